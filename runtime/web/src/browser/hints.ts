/** Reporting the state of page, network and battery to a chat. */

import type { Conditions } from "../drafting/settings.js";

/** The methods of a `Chat` that are called. */
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

/** Milliseconds within which several events count as one change of networks. */
const SETTLED_MS = 300;
/** Power is low below this level of a battery that is not charging; systems begin to save power there, too. */
const LOW_BATTERY = 0.2;

/**
 * Report the page's conditions to the chat, now and from now on, and store the chat if the page may be about to end.
 *
 * | report | when |
 * | --- | --- |
 * | `background` | the page of a phone or tablet is hidden; on a desktop the answer is written on |
 * | `lowPower` | the battery is below a fifth and not charging (Chromium only) |
 * | `metered` | the user asks to save data, or the network is cellular (Chromium only) |
 * | `networkChanged` | the kind of network changes, the network comes or goes, the page returns from the back-forward cache |
 * | `save` | the page is hidden, frozen or left |
 *
 * @returns a function that ends the reports.
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

/** Return whether the page runs on a phone or tablet. */
function isHandheld({ userAgentData }: Known): boolean {
  return userAgentData?.mobile || matchMedia("(hover: none) and (pointer: coarse)").matches;
}
