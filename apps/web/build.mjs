/**
 * Build the page: `node build.mjs [FOLDER]`, by default into the folder that `moa-serve --web` serves. With `--tests` bundle and
 * run the unit tests instead.
 */

import { createHash } from "node:crypto";
import { cp, mkdir, readdir, readFile, rename, rm, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { basename, dirname, join, relative } from "node:path";
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

import { drawIcons } from "./icons.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
const STATIC = join(HERE, "../moa_page/static");
const SHARED = { bundle: true, format: "esm", target: "es2022", logLevel: "warning", legalComments: "eof", write: false };

const [argument] = process.argv.slice(2);
if (argument === "--tests") await runTests();
else await buildPage(argument ?? STATIC);

/** Build the page beside its place and rename it, so that a moa-serve that starts meanwhile serves a complete page. */
async function buildPage(place) {
  const out = `${place}.new`;
  await rm(out, { recursive: true, force: true });
  await mkdir(join(out, "assets"), { recursive: true });
  const wasm = createRequire(import.meta.url).resolve("onnxruntime-web/ort-wasm-simd-threaded.wasm");
  const engine = await put(out, "ort.wasm", await readFile(wasm));
  const models = await put(out, "models.js", await bundled("workers/models.ts", { ENGINE: basename(engine) }));
  const main = await put(out, "main.js", await bundled("src/main.ts", { MODELS: basename(models) }));
  const style = await put(out, "style.css", await minifiedStyle());
  await cp(join(HERE, "public"), out, { recursive: true, filter: (path) => !path.endsWith("style.css") });
  await drawIcons(out);
  const page = await readFile(join(out, "index.html"), "utf8");
  await writeFile(join(out, "index.html"), page.replace('"style.css"', `"${style}"`).replace('"main.js"', `"${main}"`));
  // Large, and needed only if the device drafts.
  const assets = [engine, models];
  const shell = (await filesOf(out)).filter((name) => !assets.includes(name));
  const version = digest(Buffer.concat(await Promise.all(shell.map((name) => readFile(join(out, name))))));
  const known = { SHELL: shell.map((name) => (name === "index.html" ? "./" : name)), ASSETS: assets, VERSION: version };
  await writeFile(join(out, "sw.js"), await bundled("workers/service_worker.ts", known, "iife"));
  await rm(place, { recursive: true, force: true });
  await rename(out, place);
}

/** Return one file with `entry` and all its imports. @param known constants of its source. */
async function bundled(entry, known, format = "esm") {
  const define = Object.fromEntries(Object.entries(known).map(([name, value]) => [name, JSON.stringify(value)]));
  const tsconfig = join(HERE, dirname(entry), "tsconfig.json");
  const { outputFiles } = await esbuild.build({
    ...SHARED,
    entryPoints: [join(HERE, entry)],
    define,
    format,
    minify: true,
    tsconfig,
  });
  return outputFiles[0].contents;
}

async function minifiedStyle() {
  const { code } = await esbuild.transform(await readFile(join(HERE, "public/style.css"), "utf8"), {
    loader: "css",
    minify: true,
  });
  return Buffer.from(code);
}

/** Write a file whose name changes with its content, so that browsers may cache it for ever; return the name. */
async function put(out, name, content) {
  const [stem, ending] = name.split(".");
  const named = `assets/${stem}-${digest(content)}.${ending}`;
  await writeFile(join(out, named), content);
  return named;
}

function digest(content) {
  return createHash("sha256").update(content).digest("hex").slice(0, 12);
}

/** Return the names of all files, in order. */
async function filesOf(folder) {
  const found = await readdir(folder, { recursive: true, withFileTypes: true });
  const files = found.filter((entry) => entry.isFile());
  return files.map((entry) => relative(folder, join(entry.parentPath ?? entry.path, entry.name)).replaceAll("\\", "/")).sort();
}

async function runTests() {
  const out = join(HERE, "dist/test");
  await rm(out, { recursive: true, force: true });
  const tests = (await readdir(join(HERE, "test"))).filter((name) => name.endsWith(".test.ts"));
  await esbuild.build({
    ...SHARED,
    write: true,
    entryPoints: tests.map((name) => join(HERE, "test", name)),
    outdir: out,
    outExtension: { ".js": ".mjs" },
    platform: "node",
    tsconfig: join(HERE, "test/tsconfig.json"),
  });
  const built = (await readdir(out)).map((name) => join(out, name));
  process.exit(spawnSync(process.execPath, ["--test", ...built], { stdio: "inherit" }).status ?? 1);
}
