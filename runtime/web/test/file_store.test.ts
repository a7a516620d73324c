/** A chat's file. */

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { chmodSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";

import { FileChatStore } from "../src/node/index.js";
import { SystemLock } from "../src/node/system_lock.js";

function folder(context: TestContext): string {
  const made = mkdtempSync(join(tmpdir(), "moa-store-"));
  context.after(() => rmSync(made, { recursive: true }));
  return made;
}

test("file store: what is written is read, and only its user can", async (context) => {
  const path = join(folder(context), "new", "chat.json");
  const store = new FileChatStore(path);
  assert.equal(await store.open(), undefined);
  await store.write({ a: "\u00e9", b: [1, 2] });
  await store.write({ a: "x" });
  await store.close();
  assert.deepEqual(await store.open(), { a: "x" });
  await store.close();
  assert.equal(statSync(path).mode & 0o777, 0o600);
  assert.equal(statSync(join(path, "..")).mode & 0o777, 0o700);
  assert.deepEqual(readdirSync(join(path, "..")), ["chat.json"]);
});

test("file store: a write that fails leaves what was there", async (context) => {
  const path = join(folder(context), "chat.json");
  const store = new FileChatStore(path);
  await store.open();
  await store.write({ a: 1 });
  mkdirSync(`${path}.new`);
  await assert.rejects(store.write({ a: 2 }), /^StoreError: the chat cannot be written to /);
  assert.equal(readFileSync(path, "utf-8"), '{"a":1}');
  await store.close();
});

test("file store: an unfinished file of a program that was killed is of no harm", async (context) => {
  const path = join(folder(context), "chat.json");
  writeFileSync(`${path}.new`, "x".repeat(1000));
  chmodSync(`${path}.new`, 0o644);
  const store = new FileChatStore(path);
  await store.open();
  await store.write({ a: 1 });
  assert.equal(readFileSync(path, "utf-8"), '{"a":1}');
  assert.equal(statSync(path).mode & 0o777, 0o600);
  await store.close();
});

test("file store: a second program is told that it is one", async (context) => {
  const path = join(folder(context), "chat.json");
  const store = new FileChatStore(path);
  await store.open();
  const second = new FileChatStore(join(path, "..", ".", "chat.json"));
  await assert.rejects(second.open(), /^StoreError: .* is open in another program: close it there/);
  await store.close();
  const other = new FileChatStore(path);
  await other.open();
  await other.close();
});

test("file store: what is broken is given as it is, and set aside under a free name", async (context) => {
  const path = join(folder(context), "chat.json");
  for (const count of [1, 2]) {
    writeFileSync(path, "{");
    const store = new FileChatStore(path);
    assert.equal(await store.open(), "{");
    assert.match(await store.setAside(), /chat-set-aside-\d{4}-\d\d-\d\d-\d{6}(-\d)?\.json$/);
    await store.close();
    assert.equal(readdirSync(join(path, "..")).length, count);
  }
});

test("file store: where no file can be", async (context) => {
  const path = folder(context);
  await assert.rejects(new FileChatStore(path).open(), /^StoreError: .* is a folder: name a file in it$/);
  writeFileSync(join(path, "file"), "");
  await assert.rejects(new FileChatStore(join(path, "file", "chat.json")).open(), /^StoreError: the chat cannot be kept in /);
});

for (const platform of ["linux", "darwin"]) {
  const skip = process.platform === "win32";
  test(`file store: a lock on ${platform} is one program's, and free when that is killed`, { skip }, async (context) => {
    const name = join(folder(context), "lock");
    const module = new URL("../src/node/system_lock.js", import.meta.url).href;
    const program = `const { SystemLock } = await import(${JSON.stringify(module)});
      await SystemLock.take(${JSON.stringify(name)}, ${JSON.stringify(platform)});
      process.kill(process.pid, "SIGKILL");`;
    assert.equal(spawnSync(process.execPath, ["--input-type=module", "-e", program]).signal, "SIGKILL");
    const lock = await SystemLock.take(name, platform);
    assert.ok(lock);
    assert.equal(await SystemLock.take(name, platform), undefined);
    await lock.release();
    const next = await SystemLock.take(name, platform);
    assert.ok(next);
    await next.release();
  });
}
