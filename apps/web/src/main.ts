/** Starts the page. */

import { App } from "./app.js";
import { ChatDatabase } from "./chats/database.js";
import { takeToken } from "./connection/access.js";
import { watchUpdates } from "./shell/updates.js";
import { byId, setText } from "./views/dom.js";
import { asSentence } from "./words.js";

const BLOCKED = "This browser lets the page keep nothing: allow it to store data (cookies) for this site, and reload the page.";

try {
  const token = takeToken(); // before all that may fail: it is not to stay in the address bar
  const app = new App(await ChatDatabase.open(), token);
  void watchUpdates((takeOver) => app.offerUpdate(takeOver));
  await app.start();
} catch (error) {
  byId("banner").hidden = false;
  const blocked = error instanceof DOMException && error.name === "SecurityError";
  setText(byId("banner-text"), blocked ? BLOCKED : asSentence((error as Error).message));
}
