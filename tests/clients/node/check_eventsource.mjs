// eventsource: streams of chat, responses and messages as a browser's EventSource reads them; errors.
import { EventSource } from "eventsource";
import { OBEYING, OBEYING_URL, Row, expect } from "./asked.mjs";

const ASK = "Say it. <<1>>Grüße aus Köln<<end>>";

/** Read a stream until its last event; return the data of all events. Rejects when the source reports an error. */
function read(url, { headers = {}, body, names = ["message"], isLast }) {
  const post = (address, init) =>
    fetch(address, { ...init, method: "POST", headers: { ...init.headers, "Content-Type": "application/json", ...headers }, body: JSON.stringify(body) });
  return new Promise((resolve, reject) => {
    const source = new EventSource(url, { fetch: post });
    const seen = [];
    const take = ({ data }) => {
      seen.push(data);
      if (!isLast(data)) return;
      source.close();
      resolve(seen);
    };
    for (const name of names) source.addEventListener(name, take);
    source.addEventListener("error", (event) => {
      source.close();
      if (event.data !== undefined) resolve([...seen, event.data]);
      else reject(new Error(`${event.code}`));
    });
  });
}

const messages = [{ role: "user", content: ASK }];

async function ask(call) {
  const body = { model: call.model, messages: [{ role: "user", content: call.prompt }], max_tokens: 50, stream: true, ...call.fields };
  const headers = { Authorization: `Bearer ${call.key}` };
  const reading = read(`${call.url}/v1/chat/completions`, { headers, body, isLast: (data) => data === "[DONE]" || JSON.parse(data).error });
  try {
    const seen = await Promise.race([reading, new Promise((resolve) => setTimeout(resolve, call.timeout_s * 1000))]);
    if (seen === undefined) return "no event";
    return seen.some((data) => data !== "[DONE]" && JSON.parse(data).error) ? "data with `error`" : "no error";
  } catch (error) {
    return `error event, code ${error.message}`;
  }
}

const chat = new Row("eventsource (Node), chat");
await chat.shows(["stream"], async () => {
  const body = { model: OBEYING, messages, stream: true };
  const seen = await read(`${OBEYING_URL}/v1/chat/completions`, { body, isLast: (data) => data === "[DONE]" });
  const chunks = seen.slice(0, -1).map((data) => JSON.parse(data));
  expect("streamed text", chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), "Grüße aus Köln");
});
await chat.showsErrors(ask);

const responses = new Row("eventsource (Node), responses");
await responses.shows(["stream"], async () => {
  const names = ["response.output_text.delta", "response.completed"];
  const body = { model: OBEYING, input: ASK, stream: true };
  const seen = await read(`${OBEYING_URL}/v1/responses`, { body, names, isLast: (data) => JSON.parse(data).type === "response.completed" });
  expect("streamed text", seen.map((data) => JSON.parse(data).delta ?? "").join(""), "Grüße aus Köln");
});

const claude = new Row("eventsource (Node), messages");
await claude.shows(["stream"], async () => {
  const names = ["content_block_delta", "message_stop"];
  const body = { model: OBEYING, messages, max_tokens: 50, stream: true };
  const seen = await read(`${OBEYING_URL}/v1/messages`, { body, names, isLast: (data) => JSON.parse(data).type === "message_stop" });
  expect("streamed text", seen.map((data) => JSON.parse(data).delta?.text ?? "").join(""), "Grüße aus Köln");
});
process.exit(0);
