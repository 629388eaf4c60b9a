// Servers, scripts for the model that obeys, faults, and the results of a check, for all checks of Node clients.
import { spawn } from "node:child_process";
import dns from "node:dns";
import { appendFileSync, readFileSync } from "node:fs";
import { mkdtemp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { isDeepStrictEqual } from "node:util";

const { VENDOR_URL, RESULTS, FAULTS, RED_PNG } = process.env;
export const { OBEYING_URL, REAL_URL, REAL_MODEL, EMBEDDER_URL, COLOURS_URL } = process.env;
export const OBEYING = "obeying", EMBEDDER = "embedder", COLOURS = "colours";
export const QUESTION = "What is the capital of France?";
export const COLOUR_QUESTION = "Which colour?";
export const RED = readFileSync(RED_PNG).toString("base64");
export const TEXTS = ["a cat sat on the mat", "stocks fell today", "rain in the north"];
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

// Another name for this machine: `fetch` sends no Host header but that of its address.
const { lookup } = dns;
dns.lookup = (name, options, done) => lookup(name.endsWith(".example") ? "127.0.0.1" : name, options, done);

export function expect(what, got, wanted) {
  if (isDeepStrictEqual(got, wanted)) return;
  throw new Error(`${what}: ${JSON.stringify(got)}, not ${JSON.stringify(wanted)}`);
}

export const length = (vector) => Number(Math.hypot(...vector).toFixed(4));

/** A row of docs/reference/clients.md: what one client can do by one of its ways to ask. */
export class Row {
  constructor(name) {
    this.name = name;
  }

  /** Record the columns as right unless an answer is wrong. */
  async shows(columns, check) {
    let fault = null;
    try {
      await check();
    } catch (error) {
      fault = `${error.name}: ${error.message}`;
    }
    for (const column of columns) this.record(column, fault === null ? "yes" : "**fail**", "", fault);
  }

  /** Record that Octavo refuses what the client asks, with this class of error, and why. */
  async lacks(column, note, ask, wanted) {
    const raised = await nameOfError(ask);
    this.record(column, "no", note, raised === wanted ? null : `${raised}, not ${wanted}`);
  }

  /** Record the class of each error, and that of the vendor's answer unless it is the same. `notes`: by column, why the
   * two differ. */
  async showsErrors(ask, notes = {}) {
    for (const { column, url, repeats, ...fault } of JSON.parse(FAULTS)) {
      const call = { ...fault, url: process.env[url].replace("127.0.0.1", fault.host ?? "127.0.0.1") };
      for (let i = 0; i < repeats; i++) await nameOfError(() => ask(call));
      const got = await nameOfError(() => ask(call));
      const vendors = { ...call, url: VENDOR_URL, model: column, prompt: "Hello", fields: {} };
      const wanted = await nameOfError(() => ask(vendors));
      const note = notes[column] ?? "";
      const isRight = (got === wanted) !== Boolean(note);
      const cell = got === wanted ? got : `${got} (vendor: ${wanted})`;
      this.record(column, isRight ? cell : "**fail**", note, isRight ? null : `${got}; the vendor's answer: ${wanted}`);
    }
  }

  record(column, cell, note, fault) {
    appendFileSync(RESULTS, `${JSON.stringify({ row: this.name, column, cell, note, fault })}\n`);
  }
}

/** Class of the error that a call raises; else what the call returns, if it is a text. */
async function nameOfError(ask) {
  try {
    const answer = await ask();
    return typeof answer === "string" ? answer : "no error";
  } catch (error) {
    return error.constructor.name;
  }
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
