// Vercel's ai: text, streams, a tool loop, a typed answer with and without tools, by each provider that reaches Octavo.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ASK_FOR_CITY, ASK_FOR_SUMMARY, CITY_SCHEMA, OBEYING, OBEYING_URL, QUESTION, REAL_MODEL, REAL_URL, Row, SUMMARY, WARM_PARIS, WEATHER, expect } from "./asked.mjs";

const PROVIDERS = {
  "openai responses": (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses,
  "openai chat": (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat,
  "openai-compatible": (url) => createOpenAICompatible({ name: "octavo", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true }),
  anthropic: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" }),
};
const tools = {
  get_weather: tool({
    description: "The weather in a city.", execute: async () => WEATHER,
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false }),
  }),
};
const output = Output.object({ schema: jsonSchema(CITY_SCHEMA) });
for (const [name, provider] of Object.entries(PROVIDERS)) {
  const real = { model: provider(REAL_URL)(REAL_MODEL), maxOutputTokens: 100, maxRetries: 0, temperature: 0, prompt: QUESTION };
  const obeying = { model: provider(OBEYING_URL)(OBEYING), maxRetries: 0, stopWhen: stepCountIs(3), tools };
  const row = new Row(`ai (Vercel), ${name}`);
  await row.shows(["chat"], async () => expect("name in the text", (await generateText(real)).text.includes("Paris"), true));
  await row.shows(["tools"], async () => expect("answer", (await generateText({ ...obeying, prompt: ASK_FOR_SUMMARY })).text, SUMMARY));
  await row.shows(["stream"], async () => {
    expect("streamed answer", (await streamText({ ...obeying, prompt: ASK_FOR_SUMMARY }).steps).at(-1).text, SUMMARY);
  });
  await row.shows(["structured output"], async () => {
    expect("keys of a typed answer", Object.keys((await generateText({ ...real, output })).output), ["name", "celsius"]);
    if (name === "anthropic") return;
    expect("typed answer with a tool", (await generateText({ ...obeying, prompt: ASK_FOR_CITY, output })).output, WARM_PARIS);
  });
}
