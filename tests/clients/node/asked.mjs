// Servers, scripts for the model that obeys, and `expect`, for all checks of Node clients.
import { spawn } from "node:child_process";
import { mkdtemp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { isDeepStrictEqual } from "node:util";

export const { OBEYING_URL, REAL_URL, REAL_MODEL } = process.env;
export const OBEYING = "obeying";
export const QUESTION = "What is the capital of France?";
export const CITY_SCHEMA = {
  type: "object",
  properties: { name: { enum: ["Paris", "Rome"] }, celsius: { type: "integer", minimum: -9, maximum: 45 } },
  required: ["name", "celsius"],
  additionalProperties: false,
};
export const WARM_PARIS = { name: "Paris", celsius: 21 };
export const WEATHER = "21 degrees";
export const SUMMARY = `The tool said: ${WEATHER}`;
const CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>';
export const ASK_FOR_SUMMARY = `How warm is Paris? <<1>>${CALL}<<2>>The tool said: %LAST%<<end>>`;
export const ASK_FOR_CITY = `How warm is Paris? <<1>>${CALL}<<2>>${JSON.stringify(WARM_PARIS)}<<end>>`;

/** End the check with its first wrong answer. */
export function expect(what, got, wanted) {
  if (isDeepStrictEqual(got, wanted)) return;
  console.error(`wrong: ${what}: ${JSON.stringify(got)}, not ${JSON.stringify(wanted)}`);
  process.exit(1);
}

/** Run a command of an installed package in an empty folder with nothing of the user's settings; return its output. */
export async function run(command, args, env) {
  const home = await mkdtemp(join(tmpdir(), "client-"));
  const path = join(import.meta.dirname, "node_modules", ".bin", command);
  const child = spawn(path, args, { cwd: home, env: { PATH: process.env.PATH, HOME: home, ...env(home) }, stdio: ["ignore", "pipe", "pipe"] });
  let output = "", errors = "";
  child.stdout.on("data", (data) => (output += data));
  child.stderr.on("data", (data) => (errors += data));
  const code = await new Promise((resolve) => child.on("close", resolve));
  if (code !== 0) expect(`exit code, after ${(errors + output).slice(-300)}`, code, 0);
  return output;
}
