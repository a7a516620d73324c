// What every client asks for, see asked.py.
export const QUESTION = "Paint it.";
export const USER = [{ role: "user", content: QUESTION }];
export const SCHEMA = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: { name: "paint", description: "Paint it.", parameters: SCHEMA },
};
