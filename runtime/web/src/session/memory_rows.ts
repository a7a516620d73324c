/** Memory rows on the wire: int8 with one float16 scale per token and head, or float16. */

import { RowEncoding, type MemoryRows } from "../wire/moa/v1/session_pb.js";

/** Keys or values of `count` tokens: float32 `[count, kvHeads, headDim]`, row-major. */
export interface KvArray {
  readonly count: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly data: Float32Array;
}

/** The sizes in a MemoryRows message disagree, or a value is not finite. */
export class RowsError extends Error {}

/**
 * Decode keys and values.
 *
 * @throws RowsError if the encoding is unknown, the sizes disagree, or a value is not finite.
 */
export function decodeRows(rows: MemoryRows): { keys: KvArray; values: KvArray } {
  if (!rows.count || !rows.kvHeads || !rows.headDim) { // the other sizes are arbitrary
    const nothing = { count: 0, kvHeads: 0, headDim: 0, data: new Float32Array() };
    return { keys: nothing, values: nothing };
  }
  const both = unpacked(rows);
  if (!both.every(Number.isFinite)) throw new RowsError("numbers that are not finite");
  const { count, kvHeads, headDim } = rows;
  const half = both.length / 2;
  const part = (data: Float32Array): KvArray => ({ count, kvHeads, headDim, data });
  return { keys: part(both.subarray(0, half)), values: part(both.subarray(half)) };
}

/** Return the first `count` rows, as a view. */
export function firstRows(numbers: KvArray, count: number): KvArray {
  if (count >= numbers.count) return numbers;
  return { ...numbers, count, data: numbers.data.subarray(0, count * numbers.kvHeads * numbers.headDim) };
}

function unpacked(rows: MemoryRows): Float32Array {
  const shape = [2, rows.count, rows.kvHeads, rows.headDim];
  const title = `rows of shape (${shape.join(", ")})`;
  const numbers = shape.reduce((product, size) => product * BigInt(size), 1n); // the sender is untrusted: the product may exceed 2^53
  if (rows.encoding === RowEncoding.FLOAT16) {
    if (BigInt(rows.data.length) !== 2n * numbers) {
      throw new RowsError(`float16 ${title} take ${2n * numbers} bytes, not ${rows.data.length}`);
    }
    return halves(rows.data);
  }
  if (rows.encoding === RowEncoding.INT8) {
    const scaleBytes = 4n * BigInt(rows.count) * BigInt(rows.kvHeads);
    if (BigInt(rows.data.length) !== numbers || BigInt(rows.scales.length) !== scaleBytes) {
      throw new RowsError(
        `int8 ${title} take ${numbers} bytes and ${scaleBytes} of scales, ` +
          `not ${rows.data.length} and ${rows.scales.length}`,
      );
    }
    const scales = halves(rows.scales);
    const whole = new Int8Array(rows.data.buffer, rows.data.byteOffset, rows.data.length);
    return Float32Array.from(whole, (number, at) => number * scales[Math.floor(at / rows.headDim)]!);
  }
  throw new RowsError(`unknown row encoding ${rows.encoding}`);
}

/** Convert little-endian float16 to float32, exactly. */
function halves(bytes: Uint8Array): Float32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.length >> 1 }, (_, at) => half(view.getUint16(2 * at, true)));
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
