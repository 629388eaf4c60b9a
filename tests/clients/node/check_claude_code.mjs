// Claude Code: one task without a terminal; the model calls the Bash tool, sees its output, and answers.
import { OBEYING, OBEYING_URL, Row, expect, run } from "./asked.mjs";

const CALL = '<tool_call>{"name": "Bash", "arguments": {"command": "echo $((6 * 7))", "description": "Multiply"}}</tool_call>';
const TASK = `Multiply six by seven. <<1>>${CALL}<<2>>The tool said: %LAST%<<end>>`;
await new Row("Claude Code").shows(["chat", "stream", "tools"], async () => {
  const output = await run("claude", ["--print", TASK, "--allowedTools", "Bash"], () => ({
    ANTHROPIC_BASE_URL: OBEYING_URL, ANTHROPIC_AUTH_TOKEN: "none", ANTHROPIC_MODEL: OBEYING, ANTHROPIC_SMALL_FAST_MODEL: OBEYING,
    ANTHROPIC_DEFAULT_HAIKU_MODEL: OBEYING, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_AUTOUPDATER: "1",
  }));
  expect("answer", output.trim(), "The tool said: 42");
});
