// A chat in your own program. Cut the network while it answers: the device writes on, and the target checks it later.
//
// node embed.mjs BUNDLE ws://HOST:8765 "Why is the sky blue?"      BUNDLE is of moa-export --target web

import { Chat, MoaError, loadModels } from "@moa-edge/runtime";
import { nodeHost, openBundle } from "@moa-edge/runtime/node";
import { WebSocket } from "ws"; // pages, and Node from 22 on, have their own

async function main(folder, url, question) {
  const bundle = await openBundle(folder);
  const models = await loadModels(bundle, { ort: await import(process.env.ORT ?? "onnxruntime-web") });
  const endpoint = { url, token: process.env.MOA_TOKEN };
  const chat = await Chat.connect(bundle, endpoint, { ...models.forConversation(), host: nodeHost(WebSocket) });
  for await (const event of chat.send(question, { maxNewTokens: 200 })) {
    if (event.event === "LinkChanged") {
      console.error(`[${event.status}] ${event.detail}`);
    } else if (event.event === "AnswerUpdate") { // event.tentative is what the target has not confirmed yet
      process.stdout.write(event.text);
    } else if (event.event === "AnswerFinished") {
      console.log();
    }
  }
  await chat.close();
  await models.close();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error instanceof MoaError ? `error: ${error.message}` : error);
  process.exitCode = 1;
});
