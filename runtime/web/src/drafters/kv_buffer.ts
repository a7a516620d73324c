/** Keys and values in arrays that grow. */

import type { KvShape } from "../backends/base.js";
import type { KvArray } from "../session/memory_rows.js";
import { RowsMismatchError } from "./base.js";

const FIRST_CAPACITY = 256;

/**
 * Keys and values of positions `0..length-1` in arrays that double when full. The valid part is a prefix of each array, so the
 * engine gets it without a copy.
 */
export class GrowingRows {
  length = 0;
  private keys = new Float32Array();
  private values = new Float32Array();

  constructor(private readonly kvShape: KvShape) {}

  /**
   * Put rows at `start`, in place of those held from there on.
   *
   * @throws RowsMismatchError a gap before `start`, or another shape than `[n, kvHeads, headDim]`.
   */
  write(start: number, keys: KvArray, values: KvArray): void {
    checkRows(start, keys, values, this.length, this.kvShape);
    const width = this.kvShape.kvHeads * this.kvShape.headDim;
    const stop = start + keys.count;
    if (stop * width > this.keys.length) {
      const capacity = width * Math.max(stop, FIRST_CAPACITY, (2 * this.keys.length) / width);
      this.keys = grown(this.keys, this.length * width, capacity);
      this.values = grown(this.values, this.length * width, capacity);
    }
    this.keys.set(keys.data, start * width);
    this.values.set(values.data, start * width);
    this.length = stop;
  }

  /** Forget positions `length` and above. */
  truncate(length: number): void {
    this.length = Math.max(0, Math.min(this.length, length));
  }

  /** Forget all, and free the arrays. */
  release(): void {
    this.length = 0;
    this.keys = this.values = new Float32Array();
  }

  /** Return views of the first `count` keys and values. */
  first(count: number): readonly [KvArray, KvArray] {
    const end = count * this.kvShape.kvHeads * this.kvShape.headDim;
    const view = (data: Float32Array): KvArray => ({ ...this.kvShape, count, data: data.subarray(0, end) });
    return [view(this.keys), view(this.values)];
  }
}

/**
 * Check that rows can be put at `start`.
 *
 * @param held rows before them.
 * @throws RowsMismatchError a gap, or another shape than `[n, kvHeads, headDim]`.
 */
export function checkRows(start: number, keys: KvArray, values: KvArray, held: number, { kvHeads, headDim }: KvShape): void {
  const expected = shapeOf({ kvHeads, headDim, count: keys.count });
  if (shapeOf(keys) !== expected || shapeOf(values) !== expected) {
    throw new RowsMismatchError(`rows have shapes ${shapeOf(keys)} and ${shapeOf(values)}, expected ${expected}`);
  }
  if (start < 0 || start > held) {
    throw new RowsMismatchError(`rows start at position ${start}, but only ${held} are held: a gap`);
  }
}

function shapeOf({ count, kvHeads, headDim }: KvShape & { count: number }): string {
  return `(${count}, ${kvHeads}, ${headDim})`;
}

function grown(array: Float32Array, used: number, capacity: number): Float32Array<ArrayBuffer> {
  const larger = new Float32Array(capacity);
  larger.set(array.subarray(0, used));
  return larger;
}
