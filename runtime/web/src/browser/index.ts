/** The parts of the runtime for browsers alone. */

export { IndexedDbChatStore } from "./chat_store.js";
export { browserHost } from "./host.js";
export { followPage, type Hinted } from "./hints.js";
export { CacheStore, FileSystemStore, browserStore } from "./store.js";
