/** Start the page. */

import { takeToken } from "./access.js";
import { App } from "./app.js";
import { ChatDatabase } from "./chats.js";
import { asSentence } from "./strings.js";
import { byId, setText } from "./views/dom.js";

const BLOCKED = "This browser does not let the page store data: allow data (cookies) for this site, and reload the page.";

try {
  const token = takeToken(); // before anything that may fail, so that it does not stay in the address bar
  const app = new App(await ChatDatabase.open(), token, sessionStorage);
  void watchUpdates((takeOver) => app.offerUpdate(takeOver));
  await app.reopen();
  await app.start();
} catch (error) {
  byId("banner").hidden = false;
  const blocked = error instanceof DOMException && error.name === "SecurityError";
  setText(byId("banner-text"), blocked ? BLOCKED : asSentence((error as Error).message));
}

const LOOK_MS = 3_600_000;

/**
 * Register the service worker, so that the page starts without a network, and look for newer versions of the page.
 *
 * @param found called if there is a newer version, with a function that reloads the page as that version.
 */
export async function watchUpdates(found: (takeOver: () => void) => void): Promise<void> {
  if (!("serviceWorker" in navigator)) return; // no secure context
  const hadOne = navigator.serviceWorker.controller !== null;
  let registration: ServiceWorkerRegistration;
  try {
    registration = await navigator.serviceWorker.register("sw.js", { updateViaCache: "none" });
  } catch {
    return; // for example if the user accepted an invalid certificate: the page works, but needs a network to start
  }
  const tell = (worker: ServiceWorker | null): void => {
    if (worker !== null && hadOne) found(() => takeOver(worker));
  };
  tell(registration.waiting);
  registration.addEventListener("updatefound", () => {
    const worker = registration.installing;
    worker?.addEventListener("statechange", () => {
      if (worker.state === "installed") tell(worker);
    });
  });
  setInterval(() => void registration.update().catch(() => undefined), LOOK_MS); // it fails without a network
}

function takeOver(worker: ServiceWorker): void {
  navigator.serviceWorker.addEventListener("controllerchange", () => location.reload(), { once: true });
  worker.postMessage("take over");
}
