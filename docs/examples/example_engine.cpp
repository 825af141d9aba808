// An engine for `kdtr run --engine`, complete and without any library: reads the inputs, decodes, writes the answer.
//
//     g++ -std=c++17 -O2 -o example_engine example_engine.cpp
//     kdtr run golden.h5 -o run.h5 --engine command:"./example_engine {inputs} {out}"
//
// docs/engines.md is the contract. A safetensors file is an 8-byte little-endian length, a JSON header of that length
// {name: {dtype, shape, data_offsets}}, and the bytes of the arrays. Little-endian machines only.
//
// The "model" is `logit` below: a hash of the token before, the position and the vocabulary id. It knows nothing, so a
// diff says DIVERGED. Put your model in its place: everything around it is what an engine needs.

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// ---- JSON, as much of it as a safetensors header has: objects, lists, texts, whole numbers --------------------------

struct Json {
    std::string text;                  // of a text or a number
    std::vector<Json> items;           // of a list
    std::map<std::string, Json> keys;  // of an object

    const Json& at(const std::string& key) const {
        auto found = keys.find(key);
        if (found == keys.end()) fail("the header has no " + key);
        return found->second;
    }
};

struct Parser {
    const std::string& s;
    size_t at = 0;

    char peek() {
        while (at < s.size() && std::isspace(static_cast<unsigned char>(s[at]))) ++at;
        if (at >= s.size()) fail("the header ends early");
        return s[at];
    }

    void expect(char c) {
        if (peek() != c) fail(std::string("the header lacks a ") + c);
        ++at;
    }

    unsigned hex4() {
        if (at + 4 > s.size()) fail("the header ends early");
        unsigned code = std::strtoul(s.substr(at, 4).c_str(), nullptr, 16);
        at += 4;
        return code;
    }

    void utf8(std::string& out, uint32_t c) {
        if (c < 0x80) {
            out += static_cast<char>(c);
        } else if (c < 0x800) {
            out += static_cast<char>(0xC0 | c >> 6);
            out += static_cast<char>(0x80 | (c & 63));
        } else if (c < 0x10000) {
            out += static_cast<char>(0xE0 | c >> 12);
            out += static_cast<char>(0x80 | (c >> 6 & 63));
            out += static_cast<char>(0x80 | (c & 63));
        } else {
            out += static_cast<char>(0xF0 | c >> 18);
            out += static_cast<char>(0x80 | (c >> 12 & 63));
            out += static_cast<char>(0x80 | (c >> 6 & 63));
            out += static_cast<char>(0x80 | (c & 63));
        }
    }

    std::string string() {
        std::string out;
        expect('"');
        for (;;) {
            if (at >= s.size()) fail("a text of the header does not end");
            char c = s[at++];
            if (c == '"') return out;
            if (c != '\\') {
                out += c;
                continue;
            }
            if (at >= s.size()) fail("a text of the header does not end");
            switch (char e = s[at++]) {
                case 'n': out += '\n'; break;
                case 't': out += '\t'; break;
                case 'r': out += '\r'; break;
                case 'b': out += '\b'; break;
                case 'f': out += '\f'; break;
                case 'u': {
                    uint32_t code = hex4();
                    if (code >= 0xD800 && code < 0xDC00) {  // the second half of a pair follows
                        at += 2;
                        code = 0x10000 + ((code - 0xD800) << 10) + (hex4() - 0xDC00);
                    }
                    utf8(out, code);
                    break;
                }
                default: out += e;  // a quote, a slash, a backslash
            }
        }
    }

    Json value() {
        Json json;
        char c = peek();
        if (c == '"') {
            json.text = string();
        } else if (c == '{') {
            for (++at; peek() != '}';) {
                std::string key = string();
                expect(':');
                json.keys[key] = value();
                if (peek() == ',') ++at;
            }
            ++at;
        } else if (c == '[') {
            for (++at; peek() != ']';) {
                json.items.push_back(value());
                if (peek() == ',') ++at;
            }
            ++at;
        } else {
            while (at < s.size() && std::strchr("+-.0123456789aeflnrstuE", s[at])) json.text += s[at++];
            if (json.text.empty()) fail("the header is no JSON");
        }
        return json;
    }
};

// ---- the inputs -----------------------------------------------------------------------------------------------------

struct Inputs {
    std::string data;  // behind the header
    Json header;

    explicit Inputs(const char* path) {
        std::ifstream file(path, std::ios::binary);
        std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        uint64_t length = 0;
        if (all.size() < 8) fail(std::string(path) + " can't be read");
        std::memcpy(&length, all.data(), 8);
        if (length > all.size() - 8) fail("the inputs are cut short");
        std::string text = all.substr(8, length);
        header = Parser{text}.value();
        data = all.substr(8 + length);
    }

    const std::string& text(const char* key) const { return header.at("__metadata__").at(key).text; }

    template <typename T>
    std::vector<T> array(const char* name, const char* dtype) const {
        const Json& entry = header.at(name);
        if (entry.at("dtype").text != dtype) fail(std::string(name) + " is not " + dtype);
        size_t begin = std::stoull(entry.at("data_offsets").items.at(0).text);
        size_t end = std::stoull(entry.at("data_offsets").items.at(1).text);
        if (begin > end || end > data.size()) fail(std::string(name) + " lies outside the file");
        std::vector<T> out((end - begin) / sizeof(T));
        std::memcpy(out.data(), data.data() + begin, out.size() * sizeof(T));
        return out;
    }
};

// ---- the answer -----------------------------------------------------------------------------------------------------

struct Output {
    std::string header, data;

    template <typename T>
    void add(const std::string& name, const char* dtype, const std::string& shape, const std::vector<T>& values) {
        size_t begin = data.size();
        data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
        header += ",\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
                  std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
    }

    void write(const char* path, const std::string& about) {
        std::string all = "{\"__metadata__\":{\"about\":\"" + about + "\"}" + header + "}";
        all.append((8 - all.size() % 8) % 8, ' ');
        uint64_t length = all.size();
        std::ofstream file(path, std::ios::binary);
        file.write(reinterpret_cast<const char*>(&length), 8);
        file << all << data;
        if (!file.flush()) fail(std::string(path) + " can't be written");
    }
};

// ---- the model ------------------------------------------------------------------------------------------------------

float logit(uint32_t token, uint32_t position, uint32_t id) {
    uint32_t h = token * 2654435761u ^ position * 2246822519u ^ id * 3266489917u;
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    h ^= h >> 16;
    return static_cast<float>(h >> 8) * (1.0f / 8388608.0f) - 1.0f;  // 24 bits: exact in float32
}

void run(const char* in, const char* out) {
    Inputs inputs(in);
    if (inputs.text("schema") != "kdtr.inputs/1") fail("inputs of another version: " + inputs.text("schema"));
    if (std::stod(inputs.text("temperature")) != 0) fail("this example decodes greedily; the golden samples");
    const auto ids = inputs.array<int32_t>("prompts/ids", "I32");
    const auto offsets = inputs.array<int64_t>("prompts/offsets", "I64");
    const size_t vocab = std::stoull(inputs.text("vocab_size")), steps = std::stoull(inputs.text("steps"));
    const bool forced = inputs.text("teacher_forced") == "true", stops = inputs.text("ignore_eos") != "true";
    std::vector<int32_t> fed;
    std::vector<int64_t> fed_offsets;
    if (forced) {
        fed = inputs.array<int32_t>("tokens/ids", "I32");
        fed_offsets = inputs.array<int64_t>("tokens/offsets", "I64");
    }
    std::vector<int32_t> stop_ids;
    for (const char* p = inputs.text("stop_ids").c_str(); *p;) {
        char* end = nullptr;
        stop_ids.push_back(static_cast<int32_t>(std::strtol(p, &end, 10)));
        p = *end ? end + 1 : end;
    }

    std::vector<int32_t> tokens, finish;
    std::vector<int64_t> token_offsets{0};
    std::vector<float> logits;
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
        int32_t last = ids[offsets[s + 1] - 1], stopped = 0;
        uint32_t position = static_cast<uint32_t>(offsets[s + 1] - offsets[s] - 1);
        const size_t limit = forced ? static_cast<size_t>(fed_offsets[s + 1] - fed_offsets[s]) : steps;
        for (size_t t = 0; t < limit && !(stopped && !forced); ++t, ++position) {
            int32_t best = 0;
            const size_t row = logits.size();
            for (size_t v = 0; v < vocab; ++v) {
                logits.push_back(logit(last, position, static_cast<uint32_t>(v)));
                if (logits[row + v] > logits[row + best]) best = static_cast<int32_t>(v);  // a tie: the smaller id
            }
            last = forced ? fed[fed_offsets[s] + t] : best;
            tokens.push_back(last);
            stopped = 0;
            for (int32_t id : stop_ids) stopped |= stops && id == last;
        }
        finish.push_back(stopped);
        token_offsets.push_back(static_cast<int64_t>(tokens.size()));
    }

    Output output;
    const std::string n = std::to_string(tokens.size());
    output.add("tokens/offsets", "I64", std::to_string(token_offsets.size()), token_offsets);
    output.add("tokens/ids", "I32", n, tokens);
    output.add("finish", "I32", std::to_string(finish.size()), finish);
    output.add("logits", "F32", n + "," + std::to_string(vocab), logits);
    output.write(out, "{\\\"name\\\":\\\"hash\\\",\\\"version\\\":\\\"1\\\",\\\"compiler\\\":\\\"C++\\\"}");
    std::printf("example_engine: %zu sequences, %zu tokens\n", finish.size(), tokens.size());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: example_engine INPUTS OUTPUT\n");
        return 2;
    }
    try {
        run(argv[1], argv[2]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "example_engine: %s\n", error.what());
        return 1;
    }
    return 0;
}
