/** The host of a program in Node. */

import { MoaError } from "../errors.js";
import type { Host } from "../host.js";
import { webHost, type SocketClass } from "../web_host.js";

/**
 * Return the host of this program.
 *
 * @param given a class of the WebSocket API in the place of the global one, which Node has from 22 on: that of the package
 *   `ws`, for example.
 * @throws MoaError there is no WebSocket class.
 */
export function nodeHost(given?: SocketClass): Host {
  const WebSocket = given ?? (globalThis as { WebSocket?: SocketClass }).WebSocket;
  if (!WebSocket) {
    throw new MoaError("this Node has no WebSocket of its own: hand in that of the package ws, nodeHost(WebSocket), or use Node 22");
  }
  return webHost({ WebSocket, turn: () => new Promise((resolve) => setImmediate(() => resolve())) });
}
