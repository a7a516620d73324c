/** The banner's text and buttons, by the state of link and device. */

import type { LinkChanged } from "@moa-edge/runtime";

import type { Notice } from "./conversations.js";
import type { DeviceState } from "./device.js";
import { asSentence, megabytes } from "./strings.js";
import type { Banner } from "./views/status_views.js";

/** Actions of the buttons. */
export interface BannerActions {
  retry(): void;
  settings(): void;
  download(): void;
  cancel(): void;
  later(): void;
  forget(): void;
}

const COPYING =
  "This server's model has no drafter: this device copies what was said before, and without a network it writes nothing.";

/** Return the most important banner; null for none. */
export function bannerOf(
  problem: string,
  link: LinkChanged | null,
  device: DeviceState,
  postponed: boolean,
  actions: BannerActions,
): Banner | null {
  const settings = { label: "Settings", run: actions.settings };
  const retry = { label: "Try again", run: actions.retry };
  if (problem !== "") return { text: problem, progress: null, actions: [retry, settings] };
  if (link?.status === "offline" && link.detail !== "" && link.retryInS === null) {
    return { text: asSentence(link.detail), progress: null, actions: [settings, retry] };
  }
  if (device.kind === "unable" && !postponed) {
    return { text: device.why, progress: null, actions: [{ label: "Understood", run: actions.later }] };
  }
  if (device.kind === "ready" || device.kind === "copying" || (postponed && device.kind !== "downloading")) return null;
  const { actions: offered, text } = deviceNotice(device, actions);
  if (offered.length === 0) return null;
  const later = device.kind === "downloading" ? [] : [{ label: "Not now", run: actions.later }];
  return { text, actions: [...offered, ...later], progress: progressOf(device) };
}

/** Return the state of the device's models, for the settings. */
export function deviceNotice(device: DeviceState, actions: BannerActions): Notice {
  switch (device.kind) {
    case "looking":
      return { text: "Checking for models on this device…", actions: [] };
    case "loading":
      return { text: "Loading the model…", actions: [] };
    case "copying":
      return { text: COPYING, actions: [] };
    case "unable":
      return { text: device.why, actions: [] };
    case "absent": {
      const what = device.writes ? "write on without a network" : "draft, and write a few words without a network";
      const text = `This device can ${what} once it has a model of ${megabytes(device.bytes)}. Until then the server drafts.`;
      return { text, actions: [{ label: `Download ${megabytes(device.bytes)}`, run: actions.download }] };
    }
    case "downloading": {
      const toGo = device.toGoS === null ? "" : `, ${Math.ceil(device.toGoS)} s to go`;
      const text = `Downloading the model: ${megabytes(device.received)} of ${megabytes(device.total)}${toGo}.`;
      return { text, actions: [{ label: "Cancel", run: actions.cancel }] };
    }
    case "stopped": {
      const why = device.why === "" ? "" : `${asSentence(device.why)} `;
      const text = `${why}${megabytes(device.received)} of ${megabytes(device.total)} of the model are here; the download continues from there.`;
      return { text, actions: [{ label: "Go on", run: actions.download }] };
    }
    case "ready": {
      const text = device.writes
        ? `The model is here (${megabytes(device.bytes)}): this device drafts, and writes on without a network.`
        : `The model is here (${megabytes(device.bytes)}): this device drafts, and without a network it writes a few words.`;
      return { text, actions: [{ label: "Delete the model", run: actions.forget }] };
    }
  }
}

function progressOf(device: DeviceState): number | null {
  return device.kind === "downloading" ? device.received / Math.max(1, device.total) : null;
}
