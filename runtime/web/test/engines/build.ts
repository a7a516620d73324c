/** Scripts for engines without Node. */

import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { gunzipSync } from "node:zlib";

import { build, type BuildOptions, type Plugin } from "esbuild";

const WEB = fileURLToPath(new URL("../../../", import.meta.url));
const VECTORS = join(WEB, "../../tests/vectors/data");
const HERE = join(WEB, "test/engines");

/** What the vectors' tests import, and what they get in an engine. */
const IN_PLACE: [RegExp, string][] = [
  [/^node:assert\/strict$/, "assert.ts"],
  [/^node:test$/, "tests.ts"],
  [/^\.\/vector_files\.js$/, "vector_files.ts"],
];

const inPlace: Plugin = {
  name: "in place of Node",
  setup({ onResolve }) {
    for (const [filter, file] of IN_PLACE) onResolve({ filter }, () => ({ path: join(HERE, file) }));
  },
};

/** Return the options of the core's build. @param hermes lowered for Hermes. */
async function optionsOf(hermes: boolean): Promise<BuildOptions> {
  const { ENGINE, HERMES } = (await import(join(WEB, "core.mjs"))) as { ENGINE: BuildOptions; HERMES: BuildOptions };
  return hermes ? { ...ENGINE, ...HERMES } : ENGINE;
}

/** Return the script that replays the vectors. */
export async function replayScript(hermes = false): Promise<string> {
  return bundled({ ...(await optionsOf(hermes)), entryPoints: [join(HERE, "replay.ts")], plugins: [inPlace], ignoreAnnotations: true });
}

/** Return `moa-core.js`. */
export async function coreScript(hermes = false): Promise<string> {
  return bundled({ ...(await optionsOf(hermes)), entryPoints: [join(WEB, "src/native/core.ts")], minify: true });
}

/** Return the script that measures steps. */
export async function stepsScript(): Promise<string> {
  return bundled({ ...(await optionsOf(false)), entryPoints: [join(HERE, "steps.ts")] });
}

async function bundled(options: BuildOptions): Promise<string> {
  const { outputFiles } = await build({ ...options, write: false });
  return outputFiles[0]!.text;
}

/** Return the script that defines the vectors' files. */
export function vectorsScript(): string {
  const files: { [name: string]: string } = { "texts/tokenizer.json": readFileSync(join(VECTORS, "texts/tokenizer.json"), "utf-8") };
  for (const folder of ["figures", "loop", "session", "texts"]) {
    for (const name of readdirSync(join(VECTORS, folder))) {
      if (name.endsWith(".gz")) files[`${folder}/${name}`] = gunzipSync(readFileSync(join(VECTORS, folder, name))).toString("utf-8");
    }
  }
  return `globalThis.vectors = ${JSON.stringify(files)};`;
}
