/** The host of a page or a worker. */

import type { Host } from "../host.js";
import { webHost } from "../web_host.js";

/** Return the host of this page. */
export function browserHost(): Host {
  return webHost({ WebSocket, turn: newTurn(), origin: globalThis.location?.origin });
}

/** Return a `turn` without timers, which browsers throttle in hidden pages. */
function newTurn(): () => Promise<void> {
  const { port1, port2 } = new MessageChannel();
  const waiting: (() => void)[] = [];
  port1.onmessage = () => waiting.shift()!();
  return () =>
    new Promise((resolve) => {
      waiting.push(resolve);
      port2.postMessage(null);
    });
}
