/** The vectors that the Python runtime wrote, and values as they have them. */

import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";

const FOLDER = new URL("../../../../tests/vectors/data/", import.meta.url);

export type Value = null | boolean | number | string | Value[] | { [key: string]: Value };

/** The values of a file, such as `session/walks`. */
export function read<T>(name: string): T[] {
  const text = gunzipSync(readFileSync(new URL(`${name}.jsonl.gz`, FOLDER))).toString("utf-8");
  return text
    .split("\n")
    .filter((line) => line)
    .map((line) => JSON.parse(line) as T);
}

/** A name as Python writes it, in our way. */
export function camel(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

/** A value of ours as the vectors have it: names with underscores, larger whole numbers as texts, nothing as null. */
export function plain(value: unknown): Value {
  if (value === null || value === undefined) return null;
  if (typeof value === "bigint") return value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : String(value);
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object") return value as Value;
  const items = Object.entries(value).map(([key, item]): [string, Value] => [snake(key), plain(item)]);
  return Object.fromEntries(items);
}

function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}
