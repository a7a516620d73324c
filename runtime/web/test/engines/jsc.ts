/** JavaScriptCore in a process of its own, without its JIT, as apps in iOS have it. */

import { spawn, type ChildProcess } from "node:child_process";
import { readFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

import type { Crossing } from "./quickjs.js";

const START = readFileSync(fileURLToPath(new URL("../../../test/engines/jsc_start.js", import.meta.url)), "utf-8");

/** A running program of scripts, and lines in and out. */
export class JavaScriptCore {
  /** Done when the process has ended. */
  readonly ended: Promise<string>;
  private readonly process: ChildProcess;

  /**
   * @param scripts run in order, after `jsc_start.js`.
   * @param heard takes what the scripts `say`.
   */
  constructor(scripts: readonly string[], heard: (name: string, ...given: unknown[]) => void, words: readonly string[] = []) {
    const folder = mkdtempSync(join(tmpdir(), "jsc-"));
    const file = join(folder, "program.js");
    writeFileSync(file, [START, ...scripts].join("\n"));
    this.process = spawn("jsc", [...words, file], { env: { ...process.env, JSC_useJIT: "0" }, stdio: ["pipe", "pipe", "inherit"] });
    const others: string[] = [];
    const lines = createInterface({ input: this.process.stdout! });
    lines.on("line", (line) => {
      if (!line.startsWith("[")) return void others.push(line); // the shell's own
      const [name, ...given] = JSON.parse(line) as [string, ...unknown[]];
      heard(name, ...given.map(fromEngine));
    });
    this.ended = new Promise((resolve, reject) => {
      this.process.on("error", reject);
      this.process.on("close", (code) => {
        rmSync(folder, { recursive: true });
        if (code) reject(new Error(`jsc ended with ${code}: ${others.join("\n")}`));
        else resolve(others.join("\n"));
      });
    });
  }

  /** Call a method of the object that the scripts serve. */
  call(method: string, ...given: Crossing[]): void {
    const packed = given.map((each) => (each instanceof Uint8Array ? { bytes: Buffer.from(each).toString("base64") } : (each ?? null)));
    this.process.stdin!.write(`${JSON.stringify([method, ...packed])}\n`);
  }

  /** End the program. */
  end(): void {
    this.process.stdin!.end("null\n");
  }
}

function fromEngine(value: unknown): unknown {
  const packed = value as { bytes?: string } | null;
  return packed?.bytes === undefined ? value : new Uint8Array(Buffer.from(packed.bytes, "base64"));
}
