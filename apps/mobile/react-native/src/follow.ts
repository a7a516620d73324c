/** What the phone tells a chat: background, network, power. */

import type { Chat, Conditions } from "@moa-edge/runtime";

/** React Native's `AppState`. */
export interface AppStateLike {
  addEventListener(type: "change", listener: (state: string) => void): { remove(): void };
}

/** The default export of `@react-native-community/netinfo`. */
export interface NetInfoLike {
  addEventListener(listener: (state: NetStateLike) => void): () => void;
}

/** The state of the network that NetInfo tells. */
export interface NetStateLike {
  readonly type: string;
  readonly isConnected: boolean | null;
  readonly details: { readonly isConnectionExpensive?: boolean } | null;
}

/**
 * Tell a chat when the app goes to the background, and when the network changes.
 *
 * The chat is stored before the system may end the app. A network that costs money is told as metered: without memory rows the
 * drafter only copies.
 *
 * @param metered whether to do so; no when omitted.
 * @returns a function that stops it.
 */
export function followApp(chat: Chat, appState: AppStateLike, netInfo?: NetInfoLike, metered = false): () => void {
  let network: string | undefined;
  const tell = (changed: Partial<Conditions>): void => {
    chat.tellConditions({ ...chat.conditions, ...changed }); // the app tells others itself
  };
  const watched = appState.addEventListener("change", (state) => {
    const background = state === "background"; // iOS tells "inactive" while a call, a dialog or the control centre is above the app
    if (background === chat.conditions.background) return;
    tell({ background });
    if (background) void chat.save();
  });
  const stop = netInfo?.addEventListener(({ type, isConnected, details }) => {
    if (metered) tell({ metered: details?.isConnectionExpensive ?? false });
    const now = isConnected === false ? "none" : type;
    if (network !== undefined && network !== now && now !== "none") void chat.networkChanged();
    network = now;
  });
  return () => {
    watched.remove();
    stop?.();
  };
}
