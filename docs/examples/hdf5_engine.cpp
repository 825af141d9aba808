// An engine for `kdtr run --engine`, complete: reads the inputs with libhdf5, decodes, writes the answer as npz.
//
//     g++ -std=c++17 -O2 -o hdf5_engine hdf5_engine.cpp $(pkg-config --cflags --libs hdf5)     # Debian: hdf5-serial
//     kdtr run golden.h5 -o run.h5 --inputs hdf5 --engine command:"./hdf5_engine {inputs} {out}.npz"
//
// docs/engines.md is the contract. An .npz is a zip of .npy files, not compressed: below. Little-endian machines only.
//
// The "model" is `logit` below: a hash of the token before, the position and the vocabulary id. It knows nothing, so a
// diff says DIVERGED. Put your model in its place: everything around it is what an engine needs.

#include <hdf5.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// ---- the inputs: datasets, and one text that is a JSON object of texts ----------------------------------------------

class Handle {  // an open file, dataset, type or space
   public:
    Handle(hid_t id, herr_t (*close)(hid_t), const std::string& what) : id_(id), close_(close) {
        if (id_ < 0) fail("the inputs have no " + what);
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    ~Handle() { close_(id_); }
    operator hid_t() const { return id_; }

   private:
    hid_t id_;
    herr_t (*close_)(hid_t);
};

class Inputs {
   public:
    explicit Inputs(const char* path)
        : file_(H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose, std::string("readable file ") + path) {
        Handle dataset(H5Dopen2(file_, "metadata", H5P_DEFAULT), H5Dclose, "metadata");
        Handle type(H5Dget_type(dataset), H5Tclose, "type of metadata");
        if (H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type)) fail("metadata is no fixed-length text");
        std::string json(H5Tget_size(type), '\0');
        if (H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, json.data()) < 0) fail("metadata can't be read");
        parse(json);
    }

    const std::string& text(const std::string& key) const {
        auto found = texts_.find(key);
        if (found == texts_.end()) fail("the inputs have no text " + key);
        return found->second;
    }

    // An array of one dimension; libhdf5 converts what is stored to the type that is asked for.
    template <typename T>
    std::vector<T> array(const char* name, hid_t native) const {
        Handle dataset(H5Dopen2(file_, name, H5P_DEFAULT), H5Dclose, name);
        Handle space(H5Dget_space(dataset), H5Sclose, std::string("shape of ") + name);
        hsize_t size = 0;
        if (H5Sget_simple_extent_ndims(space) != 1) fail(std::string(name) + " is no list");
        H5Sget_simple_extent_dims(space, &size, nullptr);
        std::vector<T> out(size);
        if (size && H5Dread(dataset, native, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) < 0)
            fail(std::string(name) + " can't be read");
        return out;
    }

   private:
    void parse(const std::string& json) {  // {"key": "value", ...}
        size_t at = 0;
        auto expect = [&](char c) {
            at = json.find_first_not_of(" \n\r\t", at);
            if (at == std::string::npos || json[at++] != c) fail(std::string("metadata lacks a ") + c);
        };
        expect('{');
        do {
            expect('"');
            std::string key = string(json, at);
            expect(':');
            expect('"');
            texts_[key] = string(json, at);
            at = json.find_first_not_of(" \n\r\t", at);
        } while (at != std::string::npos && json[at] == ',' && ++at);
        expect('}');
    }

    static std::string string(const std::string& json, size_t& at) {  // from behind the quote to behind the other one
        std::string out;
        while (at < json.size() && json[at] != '"') {
            char c = json[at++];
            if (c == '\\' && at < json.size()) {
                switch (c = json[at++]) {
                    case 'n': c = '\n'; break;
                    case 't': c = '\t'; break;
                    case 'r': c = '\r'; break;
                    case 'b': c = '\b'; break;
                    case 'f': c = '\f'; break;
                    case 'u': unicode(json, at, out); continue;
                    default: break;  // a quote, a slash, a backslash
                }
            }
            out += c;
        }
        if (at++ >= json.size()) fail("metadata ends early");
        return out;
    }

    static void unicode(const std::string& json, size_t& at, std::string& out) {  // kdtr writes ASCII: \u.... for the rest
        auto hex = [&] {
            uint32_t code = static_cast<uint32_t>(std::strtoul(json.substr(at, 4).c_str(), nullptr, 16));
            at += 4;
            return code;
        };
        uint32_t code = hex();
        if (code >= 0xD800 && code < 0xDC00) {  // the second half of a pair follows
            at += 2;
            code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
        }
        int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        const uint32_t lead[] = {0, 0xC0, 0xE0, 0xF0};
        out += static_cast<char>(lead[more] | code >> (6 * more));
        while (more--) out += static_cast<char>(0x80 | (code >> (6 * more) & 63));
    }

    Handle file_;
    std::map<std::string, std::string> texts_;
};

// ---- the answer: .npy files in a zip that is not compressed ---------------------------------------------------------

uint32_t crc32(const std::string& data) {
    static const auto table = [] {
        std::array<uint32_t, 256> made{};
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; ++bit) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
            made[i] = c;
        }
        return made;
    }();
    uint32_t crc = 0xFFFFFFFFu;
    for (unsigned char byte : data) crc = table[(crc ^ byte) & 255] ^ crc >> 8;
    return ~crc;
}

class Npz {
   public:
    explicit Npz(const char* path) : path_(path), file_(path, std::ios::binary) {}

    // dtype as NumPy writes it ("<i4"), shape as a Python tuple ("(3, 512)", "(3,)", "()").
    void add(const std::string& name, const std::string& dtype, const std::string& shape, const void* data, size_t bytes) {
        std::string head = "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': " + shape + ", }";
        head.append(63 - (10 + head.size()) % 64, ' ').append("\n");  // the array begins at a multiple of 64
        std::string npy("\x93NUMPY\x01\x00", 8);
        number(npy, head.size(), 2);
        npy += head;
        npy.append(static_cast<const char*>(data), bytes);

        std::string entry;
        number(entry, 20, 2);  // the version of zip that reads it
        number(entry, 0, 2), number(entry, 0, 2);  // no flag, not compressed
        number(entry, 0x00210000, 4);  // 1980-01-01, so that equal answers are equal files
        number(entry, crc32(npy), 4);
        number(entry, npy.size(), 4), number(entry, npy.size(), 4);
        const std::string file = name + ".npy";
        number(entry, file.size(), 2), number(entry, 0, 2);

        const uint64_t place = static_cast<uint64_t>(file_.tellp());
        if (place + npy.size() > 0xFFFF0000u) fail("more than 4 GB need zip64; safetensors has no such limit");
        file_ << std::string("PK\x03\x04", 4) << entry << file << npy;
        directory_ += std::string("PK\x01\x02", 4);
        number(directory_, 20, 2);
        directory_ += entry;
        number(directory_, 0, 2), number(directory_, 0, 2), number(directory_, 0, 2), number(directory_, 0, 4);
        number(directory_, place, 4);
        directory_ += file;
        ++count_;
    }

    template <typename T>
    void add(const std::string& name, const char* dtype, const std::string& shape, const std::vector<T>& values) {
        add(name, dtype, shape, values.data(), values.size() * sizeof(T));
    }

    void text(const std::string& name, const std::string& ascii) {  // an array of one text, in UTF-32
        std::vector<uint32_t> wide(ascii.begin(), ascii.end());
        add(name, "<U" + std::to_string(wide.size()), "()", wide.data(), wide.size() * 4);
    }

    void finish() {
        const uint64_t place = static_cast<uint64_t>(file_.tellp());
        std::string end("PK\x05\x06", 4);
        number(end, 0, 4), number(end, count_, 2), number(end, count_, 2);
        number(end, directory_.size(), 4), number(end, place, 4), number(end, 0, 2);
        file_ << directory_ << end;
        if (!file_.flush()) fail(path_ + " can't be written");
    }

   private:
    static void number(std::string& to, uint64_t value, int bytes) {
        for (int i = 0; i < bytes; ++i) to += static_cast<char>(value >> (8 * i) & 255);
    }

    std::string path_, directory_;
    std::ofstream file_;
    uint64_t count_ = 0;
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
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // what is wrong we say ourselves
    Inputs inputs(in);
    if (inputs.text("schema") != "kdtr.inputs/1") fail("inputs of another version: " + inputs.text("schema"));
    if (std::stod(inputs.text("temperature")) != 0) fail("this example decodes greedily; the golden samples");
    const auto ids = inputs.array<int32_t>("prompts/ids", H5T_NATIVE_INT32);
    const auto offsets = inputs.array<int64_t>("prompts/offsets", H5T_NATIVE_INT64);
    const size_t vocab = std::stoull(inputs.text("vocab_size")), steps = std::stoull(inputs.text("steps"));
    const bool forced = inputs.text("teacher_forced") == "true", stops = inputs.text("ignore_eos") != "true";
    std::vector<int32_t> fed;
    std::vector<int64_t> fed_offsets;
    if (forced) {
        fed = inputs.array<int32_t>("tokens/ids", H5T_NATIVE_INT32);
        fed_offsets = inputs.array<int64_t>("tokens/offsets", H5T_NATIVE_INT64);
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

    Npz answer(out);
    const std::string n = std::to_string(tokens.size());
    answer.add("tokens/ids", "<i4", "(" + n + ",)", tokens);
    answer.add("tokens/offsets", "<i8", "(" + std::to_string(token_offsets.size()) + ",)", token_offsets);
    answer.add("finish", "<i4", "(" + std::to_string(finish.size()) + ",)", finish);
    answer.add("logits", "<f4", "(" + n + ", " + std::to_string(vocab) + ")", logits);
    answer.text("about", "{\"name\": \"hash\", \"version\": \"1\", \"compiler\": \"C++\"}");
    answer.finish();
    std::printf("hdf5_engine: %zu sequences, %zu tokens\n", finish.size(), tokens.size());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: hdf5_engine INPUTS OUTPUT.npz\n");
        return 2;
    }
    try {
        run(argv[1], argv[2]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "hdf5_engine: %s\n", error.what());
        return 1;
    }
    return 0;
}
