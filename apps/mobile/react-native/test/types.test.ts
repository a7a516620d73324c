/** The packed package has its types: an app is compiled with nothing else. */

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

const PACKAGE = process.cwd();

const APP = `
import { Chat, Models, fetchBundle, reactNativeHost, type DownloadFolder, type LinkChanged, type ModelOptions, type PauseReason } from "@moa-edge/react-native";

export async function ask(folder: DownloadFolder, ort: ModelOptions["ort"], link: (changed: LinkChanged) => void): Promise<PauseReason | undefined> {
  const found = await fetchBundle({ url: "ws://host", token: "" }, folder, { graphs: "onnx" });
  const models = await Models.load(found, { ort });
  const chat = await Chat.connect(found.bundle, { url: "ws://host" }, { ...models.forConversation(), host: reactNativeHost() });
  chat.onLink = link;
  for await (const event of chat.send("Hello")) if (event.event === "Paused") return event.reason;
  // @ts-expect-error it is a function
  chat.send = 1;
  return undefined;
}
`;

function run(command: string, words: readonly string[], folder: string): string {
  const { status, stdout, stderr } = spawnSync(command, words, { cwd: folder, encoding: "utf-8" });
  assert.equal(status, 0, stdout + stderr);
  return stdout;
}

test("an app has the package's types", () => {
  const folder = mkdtempSync(join(tmpdir(), "moa-types-"));
  try {
    const [{ filename }] = JSON.parse(run("npm", ["pack", "--json", "--ignore-scripts", "--pack-destination", folder], PACKAGE));
    const installed = join(folder, "node_modules", "@moa-edge", "react-native");
    mkdirSync(installed, { recursive: true });
    run("tar", ["-xzf", filename, "-C", installed, "--strip-components=1"], folder);
    const { dependencies } = JSON.parse(readFileSync(join(installed, "package.json"), "utf-8")) as { dependencies?: object };
    for (const name of Object.keys(dependencies ?? {})) {
      mkdirSync(join(folder, "node_modules", name, ".."), { recursive: true });
      symlinkSync(join(PACKAGE, "node_modules", name), join(folder, "node_modules", name));
    }
    writeFileSync(join(folder, "app.ts"), APP);
    const options = ["--strict", "--noEmit", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"];
    run(process.execPath, [join(PACKAGE, "node_modules/typescript/bin/tsc"), ...options, "app.ts"], folder);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});
