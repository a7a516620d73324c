/** Places of chats: AsyncStorage, MMKV, or the like. */

import { TextChatStore, type ChatStore } from "@moa-edge/runtime";

/** The parts of `@react-native-async-storage/async-storage` that are used. */
export interface AsyncStorageLike {
  getItem(key: string): Promise<string | null>;
  setItem(key: string, text: string): Promise<void>;
}

/** The parts of `react-native-mmkv` that are used. */
export interface MmkvLike {
  getString(key: string): string | undefined;
  set(key: string, text: string): void;
}

/**
 * Return the place of one chat in the app's storage.
 *
 * @param name of the chat, which is its key.
 */
export function chatStore(storage: AsyncStorageLike | MmkvLike, name: string): ChatStore {
  if ("getItem" in storage) {
    return new TextChatStore(name, { get: (key) => storage.getItem(key), set: (key, text) => storage.setItem(key, text) });
  }
  const get = async (key: string): Promise<string | null> => storage.getString(key) ?? null;
  return new TextChatStore(name, { get, set: async (key, text) => storage.set(key, text) });
}
