/** What a browser knows of its page, its network and its battery, for a chat. */

import type { Conditions } from "../drafting/settings.js";

/** The calls of a `Chat`. */
export interface Hinted {
  tellConditions(conditions: Conditions): void;
  networkChanged(): Promise<void>;
  save(): Promise<void>;
}

/** `navigator.connection`, which Chromium has. */
interface NetworkInformation extends EventTarget {
  readonly saveData?: boolean;
  readonly type?: string;
}

/** `navigator.getBattery()`, which Chromium has. */
interface Battery extends EventTarget {
  readonly charging: boolean;
  readonly level: number;
}

type Known = Navigator & {
  readonly connection?: NetworkInformation;
  readonly getBattery?: () => Promise<Battery>;
  readonly userAgentData?: { readonly mobile: boolean };
};

/** A change of networks comes in several pieces; after so many milliseconds they are one. */
const SETTLED_MS = 300;
/** Below this part of a battery that is not being charged, power is low: where systems begin to save by themselves. */
const LOW_BATTERY = 0.2;

/**
 * Tell the chat what the page hears, now and from now on, and have it stored when the page may be about to end.
 *
 * | it hears | of |
 * | --- | --- |
 * | `background` | a hidden page of a phone or tablet; on a desktop its user wants to find the answer written |
 * | `lowPower` | a battery of less than a fifth that is not being charged, where the browser says (Chromium) |
 * | `metered` | the user asks to save data, or the network is a phone's (Chromium) |
 * | `networkChanged` | another kind of network, a network or none, a page that comes back from the back-forward cache |
 * | `save` | a page that is hidden, frozen or left |
 *
 * @returns what ends that.
 */
export function followPage(chat: Hinted): () => void {
  const known = navigator as Known;
  const { connection } = known;
  const stopping = new AbortController();
  const { signal } = stopping;
  let battery: Battery | undefined;
  let network = connection?.type;

  const tell = (): void =>
    chat.tellConditions({
      background: document.visibilityState === "hidden" && isHandheld(known),
      lowPower: battery !== undefined && !battery.charging && battery.level < LOW_BATTERY,
      metered: (connection?.saveData ?? false) || connection?.type === "cellular",
    });
  const save = (): void => void chat.save();
  let settling: number | undefined;
  const changed = (): void => {
    clearTimeout(settling);
    settling = setTimeout(() => void chat.networkChanged(), SETTLED_MS);
  };

  document.addEventListener(
    "visibilitychange",
    () => {
      tell();
      if (document.visibilityState === "hidden") save();
    },
    { signal },
  );
  document.addEventListener("freeze", save, { signal });
  addEventListener("pagehide", save, { signal });
  addEventListener("pageshow", (event) => event.persisted && changed(), { signal });
  addEventListener("online", changed, { signal });
  addEventListener("offline", changed, { signal });
  connection?.addEventListener(
    "change",
    () => {
      tell();
      if (connection.type !== network) changed();
      network = connection.type;
    },
    { signal },
  );
  void known.getBattery?.().then((found) => {
    battery = found;
    for (const event of ["levelchange", "chargingchange"]) found.addEventListener(event, tell, { signal });
    if (!signal.aborted) tell();
  });
  tell();
  return () => {
    stopping.abort();
    clearTimeout(settling);
  };
}

/** Whether the page runs on a phone or tablet. */
function isHandheld({ userAgentData }: Known): boolean {
  return userAgentData?.mobile || matchMedia("(hover: none) and (pointer: coarse)").matches;
}
