// openai: chat and responses, whole, streamed and parsed; the tool runner.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ASK_FOR_SUMMARY, OBEYING, OBEYING_URL, QUESTION, REAL_MODEL, REAL_URL, SUMMARY, WEATHER, expect } from "./asked.mjs";

const City = z.object({ name: z.enum(["Paris", "Rome"]), celsius: z.number().int().min(-9).max(45) });
const real = new OpenAI({ baseURL: `${REAL_URL}/v1`, apiKey: "none", maxRetries: 0 });
const obeying = new OpenAI({ baseURL: `${OBEYING_URL}/v1`, apiKey: "none", maxRetries: 0 });
const question = { model: REAL_MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 100 };

const plain = await real.chat.completions.create(question);
const streamed = await real.chat.completions.stream(question).finalContent();
expect("streamed text", streamed, plain.choices[0].message.content);
const parsed = await real.chat.completions.parse({ ...question, response_format: zodResponseFormat(City, "city") });
expect("parsed chat", City.safeParse(parsed.choices[0].message.parsed).success, true);
const response = await real.responses.parse({ model: REAL_MODEL, input: QUESTION, text: { format: zodTextFormat(City, "city") } });
expect("parsed response", City.safeParse(response.output_parsed).success, true);

const tool = {
  type: "function",
  function: {
    name: "get_weather", parse: JSON.parse, function: () => WEATHER,
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const asked = { model: OBEYING, messages: [{ role: "user", content: ASK_FOR_SUMMARY }], tools: [tool] };
expect("answer of the tool runner", await obeying.chat.completions.runTools(asked).finalContent(), SUMMARY);
expect("streamed answer of the tool runner", await obeying.chat.completions.runTools({ ...asked, stream: true }).finalContent(), SUMMARY);
