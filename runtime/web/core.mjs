/**
 * Build the runtime as one script for any JavaScript engine: `node core.mjs [FOLDER]`, by default into `dist`. `moa-core.js` is for
 * JavaScriptCore and QuickJS, `moa-core.hermes.js` for Hermes, which has no async generators.
 */

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));

/** Options of esbuild, also for tests that run other programs in these engines. */
export const ENGINE = { bundle: true, format: "iife", target: "es2020", platform: "neutral", mainFields: ["module"], logLevel: "warning" };
/** Changes for Hermes. */
export const HERMES = { supported: { "async-generator": false, "for-await": false } };

/** Write both scripts. */
export async function buildCore(folder) {
  const entryPoints = [join(HERE, "src/native/core.ts")];
  const shared = { ...ENGINE, entryPoints, minify: true, legalComments: "eof" };
  await build({ ...shared, outfile: join(folder, "moa-core.js") });
  await build({ ...shared, ...HERMES, outfile: join(folder, "moa-core.hermes.js") });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await buildCore(process.argv[2] ?? join(HERE, "dist"));
