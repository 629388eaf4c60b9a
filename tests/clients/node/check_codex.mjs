// Codex: one task without a terminal; the model calls the shell tool, sees its output, and answers.
import { OBEYING, OBEYING_URL, Row, expect, run } from "./asked.mjs";

const CALL = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo $((6 * 7))"}}</tool_call>';
const TASK = `Multiply six by seven. <<1>>${CALL}<<2>>The tool said: %LAST%<<end>>`;
const SETTINGS = {
  model: OBEYING, model_provider: "octavo", "model_providers.octavo.name": "Octavo", "model_providers.octavo.wire_api": "responses",
  "model_providers.octavo.base_url": `${OBEYING_URL}/v1`, "model_providers.octavo.request_max_retries": 0,
};
const flags = Object.entries(SETTINGS).flatMap(([key, value]) => ["-c", `${key}=${JSON.stringify(value)}`]);
const unsandboxed = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
await new Row("Codex").shows(["chat", "stream", "tools"], async () => {
  const output = await run("codex", ["exec", ...unsandboxed, ...flags, TASK], (home) => ({ CODEX_HOME: home }));
  expect("last line of the answer", output.trim().split("\n").at(-1), "42");
});
