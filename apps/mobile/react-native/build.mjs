/** Build the package as one file that Hermes takes, with the runtime in it, and the tests. */

import { readdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

import { HERMES } from "../../../runtime/web/core.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
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
const tests = (await readdir(join(HERE, "test"))).filter((name) => name.endsWith(".ts"));
await esbuild.build({
  ...SHARED,
  target: "es2022",
  entryPoints: tests.map((name) => join(HERE, "test", name)),
  outdir: join(HERE, "dist/test"),
  outExtension: { ".js": ".mjs" },
  platform: "node",
  external: ["onnxruntime-node", "ws", "../src/index.js"],
  plugins: [{ name: "built", setup: ({ onResolve }) => onResolve({ filter: /^\.\.\/src\/index\.js$/ }, () => ({ path: "../index.js", external: true })) }],
  tsconfig: join(HERE, "test/tsconfig.json"),
});
