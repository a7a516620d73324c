/** What the runtime has for Node alone. */

export { FileChatStore } from "./chat_store.js";
export { FolderStore, openBundle } from "./folder_store.js";
