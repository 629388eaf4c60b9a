// openai: chat and responses, whole, streamed and parsed; the tool runner; images; vectors; errors.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ASK_FOR_SUMMARY, COLOURS, COLOURS_URL, COLOUR_QUESTION, EMBEDDER, EMBEDDER_URL, OBEYING, OBEYING_URL, QUESTION, REAL_MODEL, REAL_URL, RED, Row, SUMMARY,
  TEXTS, WEATHER, expect, length,
} from "./asked.mjs";

const City = z.object({ name: z.enum(["Paris", "Rome"]), celsius: z.number().int().min(-9).max(45) });
const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const real = client(REAL_URL), obeying = client(OBEYING_URL);

const clientOf = (call) => new OpenAI({ baseURL: `${call.url}/v1`, apiKey: call.key, maxRetries: 0, timeout: call.timeout_s * 1000 });

async function askChat(call) {
  const messages = [{ role: "user", content: call.prompt }];
  const answer = await clientOf(call).chat.completions.create({ model: call.model, messages, max_tokens: 50, stream: call.stream, ...call.fields });
  if (call.stream) for await (const _ of answer);
}

async function askResponses(call) {
  const answer = await clientOf(call).responses.create({ model: call.model, input: call.prompt, max_output_tokens: 50, stream: call.stream, ...call.fields });
  if (!call.stream) return;
  let last;
  for await (const event of answer) last = event.type;
  return `event ${last}`;
}

const chat = new Row("openai (Node), chat");
const question = { model: REAL_MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 100 };
let plain;
await chat.shows(["chat"], async () => {
  plain = await real.chat.completions.create(question);
  expect("name in the answer", plain.choices[0].message.content.includes("Paris"), true);
});
await chat.shows(["stream"], async () => {
  expect("streamed text", await real.chat.completions.stream(question).finalContent(), plain.choices[0].message.content);
});
await chat.shows(["structured output"], async () => {
  const parsed = await real.chat.completions.parse({ ...question, response_format: zodResponseFormat(City, "city") });
  expect("parsed chat", City.safeParse(parsed.choices[0].message.parsed).success, true);
});
await chat.shows(["tools"], async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tool = { type: "function", function: { name: "get_weather", parse: JSON.parse, function: () => WEATHER, parameters } };
  const asked = { model: OBEYING, messages: [{ role: "user", content: ASK_FOR_SUMMARY }], tools: [tool] };
  expect("answer of the tool runner", await obeying.chat.completions.runTools(asked).finalContent(), SUMMARY);
  expect("streamed answer of the tool runner", await obeying.chat.completions.runTools({ ...asked, stream: true }).finalContent(), SUMMARY);
});
await chat.shows(["images"], async () => {
  const image = { type: "image_url", image_url: { url: `data:image/png;base64,${RED}` } };
  const messages = [{ role: "user", content: [image, { type: "text", text: COLOUR_QUESTION }] }];
  const answer = await client(COLOURS_URL).chat.completions.create({ model: COLOURS, messages, temperature: 0, max_tokens: 1 });
  expect("colour", answer.choices[0].message.content, "red");
});
await chat.shows(["embeddings"], async () => {
  const { data } = await client(EMBEDDER_URL).embeddings.create({ model: EMBEDDER, input: TEXTS });
  expect("lengths of vectors", data.map(({ embedding }) => length(embedding)), [1, 1, 1]);
});
await chat.showsErrors(askChat);

const responses = new Row("openai (Node), responses");
await responses.shows(["chat"], async () => {
  plain = await real.responses.create({ model: REAL_MODEL, input: QUESTION, temperature: 0, max_output_tokens: 100 });
  expect("name in the answer", plain.output_text.includes("Paris"), true);
});
await responses.shows(["stream"], async () => {
  const stream = real.responses.stream({ model: REAL_MODEL, input: QUESTION, temperature: 0, max_output_tokens: 100 });
  expect("streamed text", (await stream.finalResponse()).output_text, plain.output_text);
});
await responses.shows(["structured output"], async () => {
  const response = await real.responses.parse({ model: REAL_MODEL, input: QUESTION, text: { format: zodTextFormat(City, "city") } });
  expect("parsed response", City.safeParse(response.output_parsed).success, true);
});
await responses.shows(["tools"], async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
  const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
  const input = [{ role: "user", content: ASK_FOR_SUMMARY }];
  const { output } = await obeying.responses.create({ model: OBEYING, input, tools });
  input.push(...output, { type: "function_call_output", call_id: output.at(-1).call_id, output: WEATHER });
  expect("answer after the tool", (await obeying.responses.create({ model: OBEYING, input, tools })).output_text, SUMMARY);
});
await responses.lacks("images", "The Responses API of Octavo takes no images: the request gets a 400 that names the part.", () => {
  const image = { type: "input_image", image_url: `data:image/png;base64,${RED}` };
  const content = [image, { type: "input_text", text: COLOUR_QUESTION }];
  return client(COLOURS_URL).responses.create({ model: COLOURS, input: [{ role: "user", content }] });
}, "BadRequestError");
await responses.showsErrors(askResponses);
