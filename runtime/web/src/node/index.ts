/** The parts of the runtime for Node alone. */

export { FileChatStore } from "./chat_store.js";
export { FolderStore, openBundle } from "./folder_store.js";
export { nodeHost } from "./host.js";
