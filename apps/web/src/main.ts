/** Starts the page. */

import { App } from "./app.js";
import { ChatDatabase } from "./chats/database.js";
import { takeToken } from "./connection/access.js";
import { watchUpdates } from "./shell/updates.js";
import { byId, setText } from "./views/dom.js";
import { asSentence } from "./words.js";

try {
  const app = new App(await ChatDatabase.open(), takeToken());
  void watchUpdates((takeOver) => app.offerUpdate(takeOver));
  await app.start();
} catch (error) {
  byId("banner").hidden = false;
  setText(byId("banner-text"), asSentence((error as Error).message));
}
