/** Frames and events in the JSON of the vectors. */

import { fromBinary, fromJson, toBinary, toJson, type JsonValue } from "@bufbuild/protobuf";
import { base64Decode } from "@bufbuild/protobuf/wire";

import { wire, type LoopEvent, type KvArray, type SessionEvent } from "../src/index.js";
import { plain, type Value } from "./vectors.js";

/** Serialise a frame from the server. */
export function bytesOf(frame: { bytes?: string }): Uint8Array {
  if (frame.bytes !== undefined) return base64Decode(frame.bytes);
  return toBinary(wire.ServerMessageSchema, fromJson(wire.ServerMessageSchema, frame as JsonValue));
}

/** Return a frame to the server as JSON. */
export function said(frame: Uint8Array): JsonValue {
  return toJson(wire.ClientMessageSchema, fromBinary(wire.ClientMessageSchema, frame));
}

/** Round the numbers of a frame in JSON as a message does: floats to 32 bits. */
export function asMessage(frame: JsonValue): JsonValue {
  return said(toBinary(wire.ClientMessageSchema, fromJson(wire.ClientMessageSchema, frame)));
}

/** Return an event as JSON. */
export function eventOf(event: SessionEvent | LoopEvent): Value {
  if (event.event !== "RowsReceived") return plain(event);
  return { event: event.event, start: event.start, keys: nested(event.keys), values: nested(event.values) };
}

/** Return rows as nested lists `[count, kvHeads, headDim]`. */
function nested(numbers: KvArray): number[][][] {
  const { count, kvHeads, headDim, data } = numbers;
  const range = (size: number): number[] => [...Array(size).keys()];
  return range(count).map((row) =>
    range(kvHeads).map((head) => {
      const from = (row * kvHeads + head) * headDim;
      return [...data.subarray(from, from + headDim)];
    }),
  );
}
