/** Values of an object in JSON, of the types that are expected. */

import { MoaError } from "../errors.js";

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

export const UINT32 = 2n ** 32n - 1n;
export const UINT64 = 2n ** 64n - 1n;
export const LARGEST_REAL = 3e38; // of the wire's floats
const LONGEST_SHOWN = 60; // characters of a wrong value, in a sentence

/** A snapshot that cannot be restored; the conversation's text may still be. */
export class SnapshotError extends MoaError {
  override readonly name = "SnapshotError";
}

export function brokenSnapshot(what: string): SnapshotError {
  return new SnapshotError(`the snapshot is broken: ${what}; begin a new conversation`);
}

/** A whole number as JSON has it: as a text where a double would not be exact. */
export function saidWhole(value: bigint): number | string {
  return value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : String(value);
}

/** The value that {@link saidWhole} wrote, if it is one. */
function wholeOf(value: unknown): bigint | undefined {
  if (typeof value === "number") return Number.isSafeInteger(value) && value >= 0 ? BigInt(value) : undefined;
  if (typeof value !== "string" || !/^[1-9][0-9]{15,19}$/.test(value)) return undefined;
  const whole = BigInt(value);
  return whole > BigInt(Number.MAX_SAFE_INTEGER) ? whole : undefined;
}

export class Reader {
  private readonly data: Record<string, unknown>;

  /**
   * @param name of the object, in a sentence.
   * @param broken makes the error, a SnapshotError when omitted.
   * @throws MoaError it is no object; so do all readers where a value is not what it should be.
   */
  constructor(
    data: unknown,
    name: string,
    private readonly broken: (what: string) => MoaError = brokenSnapshot,
  ) {
    if (typeof data !== "object" || data === null || Array.isArray(data)) {
      throw broken(`${name} must be an object, not ${shown(data)}`);
    }
    this.data = data as Record<string, unknown>;
  }

  has(key: string): boolean {
    return Object.hasOwn(this.data, key);
  }

  get(key: string): unknown {
    if (!this.has(key)) throw this.broken(`${key} is missing`);
    return this.data[key];
  }

  inner(key: string): Reader {
    return new Reader(this.get(key), key, this.broken);
  }

  text(key: string): string {
    const value = this.get(key);
    if (typeof value !== "string" || /\p{Surrogate}/u.test(value)) {
      throw this.broken(`${key} must be a text, not ${shown(value)}`);
    }
    return value;
  }

  flag(key: string): boolean {
    const value = this.get(key);
    if (typeof value !== "boolean") throw this.broken(`${key} must be true or false, not ${shown(value)}`);
    return value;
  }

  whole(key: string, most: bigint): bigint {
    const value = this.get(key);
    const whole = wholeOf(value);
    if (whole === undefined || whole > most) {
      throw this.broken(`${key} must be a whole number from 0 to ${most}, not ${shown(value)}`);
    }
    return whole;
  }

  /** A whole number of 32 bits. */
  number(key: string): number {
    return Number(this.whole(key, UINT32));
  }

  real(key: string): number {
    const value = this.get(key);
    // False for what is not a number, too.
    if (typeof value !== "number" || !(value >= 0 && value <= LARGEST_REAL)) {
      throw this.broken(`${key} must be a number from 0 to ${LARGEST_REAL}, not ${shown(value)}`);
    }
    return value;
  }

  tokens(key: string, vocabSize: number): number[] {
    return this.list(key).map((token) => {
      if (typeof token === "number" && Number.isInteger(token) && token >= 0 && token < vocabSize) return token;
      throw this.broken(`${key} must be token ids, whole numbers from 0 to ${vocabSize - 1}, not ${shown(token)}`);
    });
  }

  choice<T extends string>(key: string, values: readonly T[]): T {
    return this.member(key, this.get(key), values);
  }

  choices<T extends string>(key: string, values: readonly T[]): T[] {
    return this.list(key).map((value) => this.member(key, value, values));
  }

  list(key: string): unknown[] {
    const value = this.get(key);
    if (!Array.isArray(value)) throw this.broken(`${key} must be a list, not ${shown(value)}`);
    return value;
  }

  private member<T extends string>(key: string, value: unknown, values: readonly T[]): T {
    const found = values.find((each) => each === value);
    if (found === undefined) throw this.broken(`${key} knows ${values.join(", ")}, not ${shown(value)}`);
    return found;
  }
}

/** A value in a sentence. */
export function shown(value: unknown): string {
  const text = (typeof value === "string" ? value || "none" : JSON.stringify(value)) ?? "nothing";
  return text.length <= LONGEST_SHOWN ? text : text.slice(0, LONGEST_SHOWN - 3) + "...";
}
