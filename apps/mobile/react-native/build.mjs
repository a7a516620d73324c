/** Build the package as one file that Hermes takes, with the runtime in it, and the tests. */

import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { dirname, join, relative } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import * as esbuild from "esbuild";

import { HERMES } from "../../../runtime/web/core.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
const RUNTIME = join(HERE, "../../../runtime/web");
const SHARED = { bundle: true, format: "esm", target: "es2020", logLevel: "warning", legalComments: "eof" };

await esbuild.build({
  ...SHARED,
  ...HERMES,
  entryPoints: [join(HERE, "src/index.ts")],
  outfile: join(HERE, "dist/index.js"),
  platform: "neutral",
  mainFields: ["module"],
  tsconfig: join(HERE, "src/tsconfig.json"),
});
await declare();
const tests = (await readdir(join(HERE, "test"))).filter((name) => name.endsWith(".ts"));
const TESTS = {
  ...SHARED,
  target: "es2022",
  outdir: join(HERE, "dist/test"),
  outExtension: { ".js": ".mjs" },
  platform: "node",
  external: ["onnxruntime-node", "ws"],
  plugins: [{ name: "built", setup: ({ onResolve }) => onResolve({ filter: /^\.\.\/src\/index\.js$/ }, () => ({ path: "../index.js", external: true })) }],
};
await esbuild.build({ ...TESTS, entryPoints: tests.map((name) => join(HERE, "test", name)), tsconfig: join(HERE, "test/tsconfig.json") });
// The runtime's own tests of chats, with this package in the place of the runtime.
await esbuild.build({
  ...TESTS,
  entryPoints: [join(RUNTIME, "test/chat.test.ts")],
  tsconfig: join(RUNTIME, "test/tsconfig.json"),
  define: { "import.meta.url": JSON.stringify(pathToFileURL(join(RUNTIME, "dist/test/chat.test.js"))) }, // where they find vectors
});

/** Write the types: this package's, and the runtime's beside them, because the runtime is in this package and not installed. */
async function declare() {
  const folder = join(HERE, "dist/declarations");
  await rm(folder, { recursive: true, force: true });
  for (const [name, from] of Object.entries({ package: join(HERE, "dist/types/src"), runtime: join(RUNTIME, "dist/src") })) {
    for (const file of await readdir(from, { recursive: true })) {
      if (!file.endsWith(".d.ts") || /^(browser|node|native)\W/.test(file)) continue;
      const to = join(folder, name, file);
      const runtime = relative(dirname(to), join(folder, "runtime/index.js")).replaceAll("\\", "/");
      await mkdir(dirname(to), { recursive: true });
      await writeFile(to, (await readFile(join(from, file), "utf-8")).replaceAll('"@moa-edge/runtime"', `"${runtime}"`));
    }
  }
}
