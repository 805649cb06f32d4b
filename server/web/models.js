// Which of the server's models is talked to and looked at, where it has several.

import { json } from "./api.js";
import { byId, el } from "./dom.js";

const KEY = "mlxcel.model";
let several = false;

// The model's id for requests; undefined where the server has but one.
export const chosen = () => (several ? byId("models").value : undefined);

// A path that is about the chosen model.
export const about = (path) => (several ? `${path}?model=${encodeURIComponent(chosen())}` : path);

// Asks which models there are, and lets the person choose among several; `changed` hears of a choice. Whether the
// chosen one is there: the only one may be.
export async function learnModels(changed) {
  const { data } = await json("/v1/models"), ids = data.map(({ id }) => id);
  several = ids.length > 1;
  byId("models").hidden = !several;
  byId("model").hidden = several;
  if (!several) return true;
  const kept = chosen() || localStorage.getItem(KEY);
  byId("models").replaceChildren(...ids.map((id) => el("option", { value: id }, id)));
  byId("models").value = ids.includes(kept) ? kept : ids[0];
  byId("models").onchange = () => {
    localStorage.setItem(KEY, chosen());
    changed();
  };
  return data.find(({ id }) => id === chosen()).status.value === "loaded";
}
