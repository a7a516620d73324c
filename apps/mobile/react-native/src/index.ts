/** Chats of moa-edge in a React Native app; the runtime's own exports besides. */

export * from "@moa-edge/runtime";
export {
  downloadBundle,
  fetchBundle,
  openBundle,
  type BundleFolder,
  type DownloadFolder,
  type DownloadOptions,
  type FetchOptions,
  type FolderBundle,
} from "./bundle.js";
export { followApp, type AppStateLike, type NetInfoLike, type NetStateLike } from "./follow.js";
export { reactNativeHost } from "./host.js";
export { Models, type ModelOptions } from "./models.js";
export { chatStore, type AsyncStorageLike, type MmkvLike } from "./texts.js";
