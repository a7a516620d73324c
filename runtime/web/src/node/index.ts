/** What the runtime has for Node alone. */

export { FolderStore, openBundle } from "./folder_store.js";
