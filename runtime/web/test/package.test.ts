/** What is published, and how much of it a page loads. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { test } from "node:test";
import { gzipSync } from "node:zlib";

import { build } from "esbuild";
import ts from "typescript";

const FOLDER = fileURLToPath(new URL("../../", import.meta.url));
/** Of JavaScript, compressed, without the engine. */
const MOST_BYTES = 100 * 1024;
const MOST_CORE_BYTES = 110_000;

test("package: it has what its exports name, and no tests", () => {
  const how = { cwd: FOLDER, encoding: "utf-8", stdio: "pipe" } as const;
  const said = execFileSync("npm", ["pack", "--dry-run", "--json", "--ignore-scripts"], how);
  const [{ files }] = JSON.parse(said) as [{ files: { path: string }[] }];
  const paths = files.map(({ path }) => path);
  for (const part of ["index", "browser/index", "node/index", "browser/worker"]) {
    assert.ok(paths.includes(`dist/src/${part}.js`) && paths.includes(`dist/src/${part}.d.ts`), part);
  }
  const others = paths.filter((path) => !/^dist\/(src\/.*\.(js|d\.ts)|moa-core(\.hermes)?\.js)$/.test(path));
  assert.deepEqual(others.filter((path) => path !== "LICENSE").sort(), ["README.md", "example/embed.mjs", "package.json"]);
});

test("package: a page loads at most 100 KiB of it", async () => {
  const all = 'export * from "./dist/src/index.js"; export * from "./dist/src/browser/index.js";';
  const bundled = await build({
    stdin: { contents: all, resolveDir: FOLDER },
    bundle: true,
    minify: true,
    write: false,
    format: "esm",
    platform: "browser",
  });
  const size = gzipSync(bundled.outputFiles[0]!.contents).length;
  assert.ok(size > 10_000 && size <= MOST_BYTES, `${size} bytes`);
});

test("package: a core for any engine has at most 110 kB, and Hermes compiles the lowered one", async () => {
  const folder = mkdtempSync(join(tmpdir(), "moa-core-"));
  try {
    execFileSync(process.execPath, [join(FOLDER, "core.mjs"), folder]);
    for (const name of ["moa-core.js", "moa-core.hermes.js"]) {
      const size = gzipSync(readFileSync(join(folder, name))).length;
      assert.ok(size > 10_000 && size <= MOST_CORE_BYTES, `${name}: ${size} bytes`);
      const expressions = regularExpressions(readFileSync(join(folder, name), "utf-8"));
      assert.ok(expressions.length > 20);
      assert.deepEqual(expressions.filter((each) => /\\-.*\/[a-z]*[uv]/u.test(each)), []); // Android's QuickJS refuses these
    }
    const system = { linux: "linux64-bin", darwin: "osx-bin", win32: "win64-bin" }[process.platform as string]!;
    const hermes = join(FOLDER, "node_modules/hermes-compiler/hermesc", system, "hermesc");
    const words = ["-w", "-O", "-emit-binary", "-out", join(folder, "core.hbc")];
    execFileSync(hermes, [...words, join(folder, "moa-core.hermes.js")]);
  } finally {
    rmSync(folder, { recursive: true });
  }
});

/** Return the regular expressions of a script. */
function regularExpressions(script: string): string[] {
  const found: string[] = [];
  const visit = (node: ts.Node): void => {
    if (ts.isRegularExpressionLiteral(node)) found.push(node.text);
    ts.forEachChild(node, visit);
  };
  visit(ts.createSourceFile("script.js", script, ts.ScriptTarget.ES2022));
  return found;
}
