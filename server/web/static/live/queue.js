// A list that grows at its end and is cut at its beginning, both without moving what is in between.

const WASTE = 1024; // entries before the first that may stay until the array is made new

export class Queue {
  #items = [];
  #first = 0;

  get length() {
    return this.#items.length - this.#first;
  }

  at(i) {
    return this.#items[this.#first + i];
  }

  last() {
    return this.length ? this.#items.at(-1) : undefined;
  }

  push(item) {
    this.#items.push(item);
  }

  /** Remove and return the first entry. */
  shift() {
    const item = this.#items[this.#first];
    this.#items[this.#first++] = undefined;
    if (this.#first > WASTE && this.#first * 2 > this.#items.length) {
      this.#items = this.#items.slice(this.#first);
      this.#first = 0;
    }
    return item;
  }

  clear() {
    this.#items = [];
    this.#first = 0;
  }

  /** The index of the first entry for which `test` holds, if it holds for all after that; else the length. */
  search(test) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(this.at(middle))) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  *[Symbol.iterator]() {
    for (let i = 0; i < this.length; i++) yield this.at(i);
  }
}
