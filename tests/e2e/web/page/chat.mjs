// Chats with a verifier, keeps them in IndexedDB, and listens to the page.
import { Bundle, Chat, MemoryStore, NgramDrafter } from "/dist/src/index.js";
import { IndexedDbChatStore, browserHost, followPage } from "/dist/src/browser/index.js";
import { follow } from "./deeds.mjs";

let open; // a store that stays so

const deeds = {
  /** A question to its end, or up to so many tokens; goes on with what is stored. */
  async talk({ url, token, question, length, seed, leaveAt = Infinity }) {
    const bundle = await Bundle.open(new URL("/bundle/", location.href).href, { store: new MemoryStore(), drafter: false });
    const options = { drafter: new NgramDrafter(bundle.manifest.stopTokens), store: new IndexedDbChatStore("a"), host: browserHost() };
    const chat = await Chat.connect(bundle, { url, token }, options);
    const pending = chat.pending();
    const sampling = { temperature: 0.8, topP: 0.9, seed: BigInt(seed) };
    const events = pending ?? chat.send(question, { maxNewTokens: length, sampling });
    let first;
    for (let next = await events.next(); !next.done; next = await events.next()) {
      if (next.value.event !== "AnswerUpdate") continue;
      first ??= next.value.tokens.length;
      if (next.value.tokens.length >= leaveAt) {
        await chat.save();
        return { pending: pending !== undefined }; // and the answer goes on
      }
    }
    const { messages } = chat;
    await chat.close();
    return { pending: pending !== undefined, first, messages };
  },

  async write({ content }) {
    open = new IndexedDbChatStore("b");
    const before = await open.open();
    await open.write(content);
    return { before };
  },

  async openAgain() {
    await new IndexedDbChatStore("b").open();
  },

  async setAside() {
    const aside = await open.setAside();
    await open.close();
    const [old, moved] = [new IndexedDbChatStore("b"), new IndexedDbChatStore(aside)];
    const said = { old: await old.open(), moved: await moved.open() };
    await Promise.all([old.close(), moved.close()]);
    await moved.delete();
    return { ...said, deleted: await moved.open() };
  },

  async hints() {
    const told = [];
    const stop = followPage({
      tellConditions: (conditions) => told.push(conditions),
      networkChanged: async () => void told.push("networkChanged"),
      save: async () => void told.push("save"),
    });
    const settled = () => new Promise((resolve) => setTimeout(resolve, 1000));
    await settled();
    const begun = told.splice(0).at(-1);
    dispatchEvent(new Event("offline"));
    dispatchEvent(new Event("online"));
    await settled();
    const network = told.splice(0);
    Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
    const hidden = told.splice(0);
    delete document.visibilityState;
    dispatchEvent(new Event("pagehide"));
    document.dispatchEvent(new Event("freeze"));
    const left = told.splice(0);
    stop();
    dispatchEvent(new Event("pagehide"));
    return { begun, network, hidden, left, stopped: told };
  },
};

await follow(deeds);
