/** Settings of the page and of a chat. */

import type { Drafting, Grammar, Sampling } from "@moa-edge/runtime";

/** Settings of one chat. */
export interface ChatSettings {
  /** Instructions to the model; empty for none. */
  readonly system: string;
  /** Tokens of every answer, at most. */
  readonly maxNewTokens: number;
  /** Sample as the target's authors recommend, instead of by `temperature` and `topP`. */
  readonly recommended: boolean;
  /** 0 is greedy. */
  readonly temperature: number;
  /** 1 is no limit. */
  readonly topP: number;
  /** Whether the model reasons before it answers, if its chat template can switch that; `model` for the template's default. */
  readonly thinking: "model" | "on" | "off";
  /** Whether answers are JSON; chats of older pages have neither this nor `schema`. */
  readonly asJson?: boolean;
  /** The JSON schema that they conform to; empty for any object. */
  readonly schema?: string;
}

/** What happens if the target's text differs from the text that the device wrote offline. */
export type OnDisagreement = "server" | "mine" | "ask";

/** Settings of the page. */
export interface Settings {
  /** Address of the verifier; empty for the one that this page comes from. */
  readonly address: string;
  readonly onDisagreement: OnDisagreement;
  readonly drafting: Drafting;
  /** The model takes no steps. */
  readonly savePower: boolean;
  /** Whether the device also downloads the writer, a whole model for writing without a network. */
  readonly writer: boolean;
  /** Whether words are coloured by their origin. */
  readonly origins: boolean;
  /** Settings of new chats. */
  readonly chats: ChatSettings;
}

export const USUAL_CHAT: ChatSettings = {
  system: "",
  maxNewTokens: 512,
  recommended: true,
  temperature: 0,
  topP: 1,
  thinking: "model",
  asJson: false,
  schema: "",
};
export const USUAL_SETTINGS: Settings = {
  address: "",
  onDisagreement: "server",
  drafting: "auto",
  savePower: false,
  writer: true,
  origins: false,
  chats: USUAL_CHAT,
};

/** The sampling that a target's authors recommend, from a bundle's manifest. */
export interface Recommended {
  readonly temperature: number;
  readonly topP: number;
}

/** Return the sampling of a chat with these settings; greedy if there is no recommendation. */
export function samplingOf(settings: ChatSettings, recommended: Recommended | null, seed: bigint): Sampling {
  const { temperature, topP } = settings.recommended ? (recommended ?? { temperature: 0, topP: 1 }) : settings;
  const chosen = temperature === 0 ? { temperature: 0, topP: 1, seed: 0n } : { temperature, topP, seed };
  const grammar = grammarOf(settings);
  return { ...chosen, topK: 0, minP: 0, ...(grammar ? { grammar } : {}) };
}

/** Return what answers conform to; undefined for any text. */
function grammarOf({ asJson = false, schema = "" }: ChatSettings): Grammar | undefined {
  if (!asJson) return undefined;
  return schema.trim() ? { kind: "json_schema", text: schema } : { kind: "json_object", text: "" };
}

/** Return whether the model is to reason in a chat with these settings; undefined leaves it to the template. */
export function thinkingOf({ thinking }: ChatSettings, canSwitch: boolean): boolean | undefined {
  return canSwitch && (thinking === "on" || thinking === "off") ? thinking === "on" : undefined;
}

/** Return a random seed of 63 bits. */
export function newSeed(): bigint {
  return crypto.getRandomValues(new BigUint64Array(1))[0]! >> 1n;
}

const KEY = "settings";

/** A whole model takes about a gigabyte while it writes: with less memory than this the browser would end the page. */
const WRITER_NEEDS_GB = 4;

/** Return the default settings of a device with this memory; undefined if its browser does not tell. */
export function usualSettings(memoryGb: number | undefined): Settings {
  return { ...USUAL_SETTINGS, writer: memoryGb === undefined || memoryGb >= WRITER_NEEDS_GB };
}

/** Return the stored settings; the default for a value that is missing or of another type. */
export function loadSettings(storage: Pick<Storage, "getItem">, usual = USUAL_SETTINGS): Settings {
  let stored: unknown = null;
  try {
    stored = JSON.parse(storage.getItem(KEY) ?? "null");
  } catch {
    // damaged: use the defaults
  }
  return wellTyped(stored, usual);
}

export function saveSettings(storage: Pick<Storage, "setItem">, settings: Settings): void {
  storage.setItem(KEY, JSON.stringify(settings));
}

const WORDS: { readonly [name: string]: readonly string[] } = {
  onDisagreement: ["server", "mine", "ask"],
  drafting: ["auto", "device", "server"],
  thinking: ["model", "on", "off"],
};

/** Return `usual` with the values of `stored` that have the same type. */
function wellTyped<T extends object>(stored: unknown, usual: T): T {
  if (typeof stored !== "object" || stored === null) return usual;
  const given = stored as { readonly [name: string]: unknown };
  const known = Object.entries(usual).map(([name, value]) => {
    const other = given[name];
    if (typeof value === "object") return [name, wellTyped(other, value as object)];
    const fits = typeof other === typeof value && (WORDS[name]?.includes(other as string) ?? true);
    return [name, fits ? other : value];
  });
  return Object.fromEntries(known) as T;
}
