/** What the runtime has for browsers alone. */

export { CacheStore, FileSystemStore, browserStore } from "./store.js";
