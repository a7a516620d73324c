// The Vercel AI SDK with @ai-sdk/openai-compatible: see openai_client.py.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import { QUESTION, SCHEMA } from "./asked.mjs";

const provider = createOpenAICompatible({
  name: "moa",
  baseURL: process.argv[2],
  supportsStructuredOutputs: true,
});
const common = { model: provider("target"), prompt: QUESTION, maxOutputTokens: 64, temperature: 0, maxRetries: 0 };
const paint = tool({
  description: "Paint it.",
  inputSchema: jsonSchema(SCHEMA),
  execute: async () => "done",
});

const plain = (await generateText(common)).text;
let stream = "";
for await (const piece of streamText(common).textStream) stream += piece;
const { object } = await generateObject({ ...common, schema: jsonSchema(SCHEMA) });
const PAINT = { type: "tool", toolName: "paint" };
const calls = { ...common, tools: { paint }, toolChoice: PAINT };
const called = await generateText(calls);
// The second step answers the result of the call.
const streamed = streamText({
  ...calls,
  stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : PAINT }),
});
const steps = await streamed.steps;
console.log(
  JSON.stringify({
    plain,
    stream,
    object,
    call: [called.toolCalls[0].toolName, called.toolCalls[0].input],
    streamed_call: [steps[0].toolCalls[0].toolName, steps[0].toolCalls[0].input],
    reason: called.finishReason.replace("-", "_"),
    final: steps[1].text,
  }),
);
