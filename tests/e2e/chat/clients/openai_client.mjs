// The openai package for Node: see openai_client.py.
import OpenAI from "openai";
import { SCHEMA, TOOL, USER } from "./asked.mjs";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const common = { model: "target", messages: USER, max_tokens: 64, temperature: 0 };
const ask = (more = {}) => client.chat.completions.create({ ...common, ...more });

const plain = (await ask()).choices[0].message.content;
let stream = "";
for await (const chunk of await ask({ stream: true })) stream += chunk.choices[0].delta.content ?? "";
const form = { type: "json_schema", json_schema: { name: "paint", strict: true, schema: SCHEMA } };
const object = JSON.parse((await ask({ response_format: form })).choices[0].message.content);
const calling = { tools: [TOOL], tool_choice: "required", parallel_tool_calls: false };
const called = (await ask(calling)).choices[0];
const [call] = called.message.tool_calls;
const events = client.chat.completions.stream({ ...common, ...calling });
const [streamed] = (await events.finalChatCompletion()).choices[0].message.tool_calls;
const messages = [...USER, called.message, { role: "tool", tool_call_id: call.id, content: "done" }];
const final = (await ask({ messages, tools: [TOOL], tool_choice: "none" })).choices[0].message.content;
const named = (made) => [made.function.name, JSON.parse(made.function.arguments)];
console.log(
  JSON.stringify({
    plain,
    stream,
    object,
    call: named(call),
    streamed_call: named(streamed),
    reason: called.finish_reason,
    final,
  }),
);
