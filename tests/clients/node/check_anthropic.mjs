// @anthropic-ai/sdk: messages, streams, the tool runner, token counts, models, a structured answer.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { ASK_FOR_SUMMARY, CITY_SCHEMA, OBEYING, OBEYING_URL, QUESTION, REAL_MODEL, REAL_URL, SUMMARY, WEATHER, expect } from "./asked.mjs";

const real = new Anthropic({ baseURL: REAL_URL, apiKey: "none", maxRetries: 0 });
const obeying = new Anthropic({ baseURL: OBEYING_URL, apiKey: "none", maxRetries: 0 });
const question = { model: REAL_MODEL, max_tokens: 100, temperature: 0, messages: [{ role: "user", content: QUESTION }] };

const plain = await real.messages.create(question);
expect("streamed text", await real.messages.stream(question).finalText(), plain.content[0].text);
const { input_tokens } = await real.messages.countTokens({ model: REAL_MODEL, messages: question.messages });
expect("counted tokens", input_tokens, plain.usage.input_tokens + (plain.usage.cache_read_input_tokens ?? 0));
expect("models", (await real.models.list()).data.map((model) => model.id), [REAL_MODEL]);
const shaped = await real.messages.create({ ...question, output_config: { format: { type: "json_schema", schema: CITY_SCHEMA } } });
expect("keys of a structured answer", Object.keys(JSON.parse(shaped.content[0].text)), ["name", "celsius"]);

const tool = betaTool({
  name: "get_weather", description: "The weather in a city.", run: () => WEATHER,
  inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
});
for (const stream of [false, true]) {
  const runner = obeying.beta.messages.toolRunner({ model: OBEYING, max_tokens: 200, messages: [{ role: "user", content: ASK_FOR_SUMMARY }], tools: [tool], stream });
  expect(`answer of the tool runner, stream ${stream}`, (await runner.runUntilDone()).content.at(-1).text, SUMMARY);
}
