/** A chat's file: written whole or not at all, private to its user, and of one program at a time. */

import { constants } from "node:fs";
import { mkdir, open, readFile, realpath, rename, stat, type FileHandle } from "node:fs/promises";
import { basename, dirname, extname, join, resolve } from "node:path";

import type { ChatStore } from "../chat_store.js";
import { StoreError } from "../errors.js";
import type { SnapshotJson } from "../session/snapshot.js";
import { SystemLock } from "./system_lock.js";

/**
 * One JSON file, with the same content as Python's. Its folder is made if necessary, for the user alone. Python locks the file in
 * another way: do not open it from both at once.
 */
export class FileChatStore implements ChatStore {
  readonly name: string;
  private lock: SystemLock | undefined;

  constructor(path: string) {
    this.name = resolve(path);
  }

  async open(): Promise<unknown> {
    const { name } = this;
    if ((await stat(name).catch(() => undefined))?.isDirectory()) {
      throw new StoreError(`a chat is kept in a file, and ${name} is a folder: name a file in it`);
    }
    try {
      await mkdir(dirname(name), { recursive: true, mode: 0o700 });
      // The real path, so that all names of the file have one lock.
      this.lock = await SystemLock.take(join(await realpath(dirname(name)), basename(name)));
    } catch (error) {
      throw new StoreError(`the chat cannot be kept in ${name}: ${(error as Error).message}`);
    }
    if (!this.lock) {
      const text = `the chat in ${name} is open in another program`;
      throw new StoreError(`${text}: close it there, or keep this one in another file`);
    }
    try {
      return await this.read();
    } catch (error) {
      await this.close();
      throw new StoreError(`the chat in ${name} cannot be read: ${(error as Error).message}`);
    }
  }

  async write(content: SnapshotJson): Promise<void> {
    const { name } = this;
    const unfinished = `${name}.new`; // one name, so that killed programs leave at most one such file
    try {
      const text = JSON.stringify(content);
      await using(unfinished, async (file) => {
        await file.chmod(0o600); // an old file may have another mode
        await file.truncate();
        await file.writeFile(text);
        await file.sync();
      });
      await rename(unfinished, name);
      await syncFolder(dirname(name));
    } catch (error) {
      throw new StoreError(`the chat cannot be written to ${name}: ${(error as Error).message}`);
    }
  }

  async setAside(): Promise<string> {
    const { name } = this;
    const extension = extname(name);
    const date = new Date().toISOString().slice(0, 19).replace("T", "-").replaceAll(":", "");
    const aside = `${name.slice(0, name.length - extension.length)}-set-aside-${date}`;
    let free = aside + extension;
    for (let number = 2; await stat(free).catch(() => undefined); number++) free = `${aside}-${number}${extension}`;
    try {
      await rename(name, free);
    } catch (error) {
      throw new StoreError(`the file ${name} cannot be renamed to ${basename(free)}: ${(error as Error).message}`);
    }
    return free;
  }

  async close(): Promise<void> {
    await this.lock?.release();
    this.lock = undefined;
  }

  /** Return the content; text if it is no JSON. */
  private async read(): Promise<unknown> {
    let text: string;
    try {
      text = await readFile(this.name, "utf-8");
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
      throw error;
    }
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }
}

/** Work with a file that only its user can read; it is not truncated. */
async function using(path: string, work: (file: FileHandle) => Promise<void>): Promise<void> {
  const file = await open(path, constants.O_RDWR | constants.O_CREAT | (constants.O_NOFOLLOW ?? 0), 0o600);
  try {
    await work(file);
  } finally {
    await file.close();
  }
}

/** Sync the folder, so that the new name is on the disk, too, if the system supports that. */
async function syncFolder(folder: string): Promise<void> {
  if (process.platform === "win32") return;
  const file = await open(folder, "r");
  try {
    await file.sync().catch(() => undefined); // some file systems cannot
  } finally {
    await file.close();
  }
}
