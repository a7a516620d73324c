/** The host of a React Native app. */

import { webHost, type Host } from "@moa-edge/runtime";

interface Globals {
  readonly WebSocket: new (address: string, protocols: string[]) => object;
  readonly setTimeout: (action: () => void, milliseconds: number) => unknown;
}

const globals = globalThis as unknown as Globals;

/** Return the host of this app: React Native's timers, `fetch` and WebSocket. */
export function reactNativeHost(): Host {
  const turn = (): Promise<void> => new Promise((resolve) => void globals.setTimeout(resolve, 0));
  return webHost({ WebSocket: globals.WebSocket, turn });
}
