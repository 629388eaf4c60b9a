// @anthropic-ai/sdk: messages, streams, the tool runner, token counts, models, a structured answer; errors.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import {
  ASK_FOR_SUMMARY, CITY_SCHEMA, COLOURS, COLOURS_URL, COLOUR_QUESTION, OBEYING, OBEYING_URL, QUESTION, REAL_MODEL, REAL_URL, RED, Row, SUMMARY, WEATHER, expect,
} from "./asked.mjs";

const real = new Anthropic({ baseURL: REAL_URL, apiKey: "none", maxRetries: 0 });
const obeying = new Anthropic({ baseURL: OBEYING_URL, apiKey: "none", maxRetries: 0 });
const question = { model: REAL_MODEL, max_tokens: 100, temperature: 0, messages: [{ role: "user", content: QUESTION }] };

async function ask(call) {
  const client = new Anthropic({ baseURL: call.url, apiKey: call.key, maxRetries: 0, timeout: call.timeout_s * 1000 });
  const messages = [{ role: "user", content: call.prompt }];
  const answer = await client.messages.create({ model: call.model, messages, max_tokens: 50, stream: call.stream, ...call.fields });
  if (call.stream) for await (const _ of answer);
}

const row = new Row("@anthropic-ai/sdk (Node)");
let plain;
await row.shows(["chat"], async () => {
  plain = await real.messages.create(question);
  expect("name in the answer", plain.content[0].text.includes("Paris"), true);
  const { input_tokens } = await real.messages.countTokens({ model: REAL_MODEL, messages: question.messages });
  expect("counted tokens", input_tokens, plain.usage.input_tokens + (plain.usage.cache_read_input_tokens ?? 0));
  expect("models", (await real.models.list()).data.map((model) => model.id).includes(REAL_MODEL), true);
});
await row.shows(["stream"], async () => {
  expect("streamed text", await real.messages.stream(question).finalText(), plain.content[0].text);
});
await row.shows(["structured output"], async () => {
  const shaped = await real.messages.create({ ...question, output_config: { format: { type: "json_schema", schema: CITY_SCHEMA } } });
  expect("keys of a structured answer", Object.keys(JSON.parse(shaped.content[0].text)), ["name", "celsius"]);
});
await row.shows(["tools"], async () => {
  const tool = betaTool({
    name: "get_weather", description: "The weather in a city.", run: () => WEATHER,
    inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  });
  for (const stream of [false, true]) {
    const runner = obeying.beta.messages.toolRunner({ model: OBEYING, max_tokens: 200, messages: [{ role: "user", content: ASK_FOR_SUMMARY }], tools: [tool], stream });
    expect(`answer of the tool runner, stream ${stream}`, (await runner.runUntilDone()).content.at(-1).text, SUMMARY);
  }
});
await row.lacks("images", "The Messages API of Octavo takes no images: the request gets a 400 that names the part.", () => {
  const image = { type: "image", source: { type: "base64", media_type: "image/png", data: RED } };
  const messages = [{ role: "user", content: [image, { type: "text", text: COLOUR_QUESTION }] }];
  return new Anthropic({ baseURL: COLOURS_URL, apiKey: "none", maxRetries: 0 }).messages.create({ model: COLOURS, max_tokens: 1, messages });
}, "BadRequestError");
await row.showsErrors(ask, {
  "overload (503)": "Anthropic's status is 529, which proxies do not know. The client sends both requests again.",
});
