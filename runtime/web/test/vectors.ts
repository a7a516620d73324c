/** Reads the vectors that the Python runtime recorded, and converts values to and from their JSON. */

import { textOf, unpacked } from "./vector_files.js";

type Fields = { [key: string]: Value };
export type Value = null | boolean | number | string | Value[] | { [key: string]: Value };

/** Read the values of a file, such as `session/walks`. */
export function read<T>(name: string): T[] {
  return unpacked(`${name}.jsonl.gz`)
    .split("\n")
    .filter((line) => line)
    .map((line) => JSON.parse(line) as T);
}

/** Read a file that is not a list of values. */
export function readJson(name: string): unknown {
  return JSON.parse(textOf(name));
}

/** Convert a name from snake_case to camelCase. */
export function camel(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

/** Convert a value to the vectors' JSON: snake_case keys, large integers as strings, undefined as null. */
export function plain(value: unknown): Value {
  if (value === null || value === undefined) return null;
  if (typeof value === "bigint") return value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : String(value);
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object") return value as Value;
  const items = Object.entries(value).map(([key, item]): [string, Value] => [snake(key), plain(item)]);
  return Object.fromEntries(items);
}

/** Convert a name from camelCase to snake_case. */
export function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

/** Convert an object's keys to camelCase. */
export function ours<T>(said: Value): T {
  if (said === null) return null as T;
  return Object.fromEntries(Object.entries(said).map(([key, value]) => [camel(key), value])) as T;
}

/** Relative tolerance of numbers: logarithms differ in their last bits from platform to platform. */
const TOLERANCE = 1e-9;

/** Return whether two values are equal, numbers up to the tolerance. */
export function alike(one: Value, other: Value): boolean {
  if (typeof one === "number" && typeof other === "number") {
    const least = Math.max(Math.abs(one), Math.abs(other), 1);
    return one === other || Math.abs(one - other) <= TOLERANCE * least;
  }
  if (typeof one !== "object" || typeof other !== "object" || !one || !other) return one === other;
  const keys = Object.keys(one);
  const pair = [one, other] as [Fields, Fields];
  return keys.length === Object.keys(other).length && keys.every((key) => key in other && alike(pair[0][key]!, pair[1][key]!));
}
