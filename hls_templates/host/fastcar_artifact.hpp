// An artifact whose every file is checked before any is used: its hash is the manifest's, and the manifest's own digest is
// pinned, or covered by a signature, where the user asks for that. What is hashed is what is used: docs/tutorial/signing.md.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fastcar_digest.hpp"
#include "fastcar_error.hpp"
#include "fastcar_file.hpp"
#include "fastcar_json.hpp"

namespace fastcar_host {

// What the user requires; empty: nothing.
struct Trust {
    std::string digest;      // of manifest.json: sha256:<64 hexadecimal digits>
    std::string public_key;  // path of the PEM file of who must have signed
};

struct FileEntry {
    std::string sha256;
    uint64_t size = 0;
};

typedef std::map<std::string, std::string> Digests;  // name -> SHA-256

// Throws Error: the object has other keys. What is not understood is refused, as by fastcar_compile/trust/bundle.py.
inline const nlohmann::json& with_keys(const nlohmann::json& object, const std::vector<std::string>& keys,
                                       const std::string& where) {
    for (const std::string& key : keys) object.at(key);
    if (object.size() != keys.size()) {
        throw Error("the signature has fields that are not known", where, "have the artifact signed by this version");
    }
    return object;
}

// The content that an OpenSSF model-signing bundle says was signed, if `key` signed it. Throws Error: it did not, or the bundle
// is of another form.
inline std::string signed_payload(const nlohmann::json& bundle, const PublicKey& key, const std::string& where) {
    static const std::string TYPE = "application/vnd.in-toto+json", MEDIA = "application/vnd.dev.sigstore.bundle.v0.3+json";
    const std::string again = "do not use the artifact; get it from its signer again";
    with_keys(bundle, {"mediaType", "verificationMaterial", "dsseEnvelope"}, where);
    const nlohmann::json& material = with_keys(bundle.at("verificationMaterial"), {"publicKey", "tlogEntries"}, where);
    const nlohmann::json& envelope =
        with_keys(bundle.at("dsseEnvelope"), {"payload", "payloadType", "signatures"}, where);
    if (bundle.at("mediaType") != MEDIA || envelope.at("payloadType") != TYPE || envelope.at("signatures").size() != 1 ||
        !material.at("tlogEntries").empty()) {
        throw Error("the signature is of another kind than one by a key", where, again);
    }
    if (with_keys(material.at("publicKey"), {"hint"}, where).at("hint") != key.fingerprint()) {
        throw Error("the artifact is signed with another key than the one required, sha256:" + key.fingerprint(), where, again);
    }
    const nlohmann::json& signature = with_keys(envelope.at("signatures").at(0), {"sig", "keyid"}, where);
    const std::string payload = from_base64(envelope.at("payload").get<std::string>(), where);
    const std::string message =
        "DSSEv1 " + std::to_string(TYPE.size()) + " " + TYPE + " " + std::to_string(payload.size()) + " " + payload;
    if (!key.signed_by(from_base64(signature.at("sig").get<std::string>(), where), message)) {
        throw Error("the signature does not hold: its bytes were changed, or another key made it", where, again);
    }
    return payload;
}

// The files that a signed payload names. Throws Error: it is of another form.
inline Digests digests_of(const std::string& payload, const std::string& where) {
    const std::string again = "do not use the artifact; get it from its signer again";
    try {
        const nlohmann::json statement = parse_json(payload, where);
        const nlohmann::json& predicate = statement.at("predicate");
        if (statement.at("predicateType") != "https://model_signing/signature/v1.0" ||
            predicate.at("serialization").at("method") != "files") {
            throw Error("the signature is of another kind than one of the files of a model", where, again);
        }
        Digests found;
        for (const nlohmann::json& resource : predicate.at("resources")) {
            const std::string name = resource.at("name").get<std::string>();
            if (resource.at("algorithm") != "sha256" ||
                !found.emplace(name, resource.at("digest").get<std::string>()).second) {
                throw Error("the signature covers a file twice or by another hash than SHA-256", where, again);
            }
        }
        return found;
    } catch (const nlohmann::json::exception& error) {
        throw Error(std::string("the signature is damaged: ") + error.what(), where, "copy the artifact again");
    }
}

// The files that a bundle says were signed. Throws Error: see signed_payload, or something else was signed.
inline Digests signed_digests(const std::string& bundle, const PublicKey& key, const std::string& where) {
    try {
        return digests_of(signed_payload(parse_json(bundle, where), key, where), where);
    } catch (const nlohmann::json::exception& error) {
        throw Error(std::string("the signature is damaged: ") + error.what(), where, "copy the artifact again");
    }
}

class Artifact {
public:
    // `schema_version`: of the manifests that this program reads.
    // Throws Error: no artifact of this program there, a manifest that is damaged, or not what `trust` requires.
    Artifact(const std::string& path, const Trust& trust, int schema_version)
        : folder_(path), whole_(!trust.digest.empty() || !trust.public_key.empty()) {
        const std::string manifest = small_file("manifest.json"), digest = sha256(manifest.data(), manifest.size());
        if (!trust.digest.empty() && trust.digest != DIGEST_PREFIX + digest) {
            throw Error("the artifact's digest is " + (DIGEST_PREFIX + digest) + ", not the pinned " + trust.digest, path,
                        "do not use the artifact: get the one that is trusted");
        }
        if (!trust.public_key.empty()) {
            const PublicKey key(trust.public_key);
            signed_ = signed_digests(small_file("signature.json"), key, folder_.place("signature.json"));
            require_signed("manifest.json", digest);
        }
        parse(manifest, schema_version);
        if (!trust.public_key.empty()) compare_signed();
    }

    // Check files that are going to be used, and keep them; libraries as sealed copies. Where a digest or a signature is
    // required, it stands for the whole artifact: then check every other file too. Throws Error: one is not as the manifest says.
    void check(const std::vector<std::string>& data, const std::vector<std::string>& libraries) {
        for (const std::string& name : data) {
            if (data_.count(name) == 0) {
                const auto file = open(name);
                Mapping bytes(file.first, file.second, folder_.place(name));
                compare(name, bytes);
                data_.emplace(name, std::move(bytes));
            }
        }
        for (const std::string& name : libraries) {
            if (libraries_.count(name) == 0) {
                const auto file = open(name);
                Sealed copy(file.first, file.second, folder_.place(name));
                compare(name, copy.bytes());
                libraries_.emplace(name, std::move(copy));
            }
        }
        if (whole_) check_others();
    }

    // A file that was checked. Throws Error: it was not.
    const Mapping& data(const std::string& name) const { return checked(data_, name); }
    const Sealed& library(const std::string& name) const { return checked(libraries_, name); }

    std::string place(const std::string& name) const { return folder_.place(name); }

private:
    static constexpr uint64_t MAX_SMALL = 64u << 20;  // as fastcar_compile/support/limits.py

    template <class T>
    const T& checked(const std::map<std::string, T>& files, const std::string& name) const {
        const auto found = files.find(name);
        if (found == files.end()) {
            throw Error("the file was not checked", place(name), "call Artifact::check with every file that is used");
        }
        return found->second;
    }

    // The content of a file that the manifest does not list.
    std::string small_file(const std::string& name) const {
        uint64_t bytes = 0;
        const Handle file = folder_.open_file(name, &bytes);
        if (bytes > MAX_SMALL) {
            throw Error("the file has more than " + std::to_string(MAX_SMALL) + " bytes", place(name), "copy the artifact again");
        }
        std::string text(bytes, '\0');
        uint64_t done = 0;
        while (done < bytes) {
            const ssize_t read = pread(file.get(), &text[done], bytes - done, static_cast<off_t>(done));
            if (read <= 0) throw Error("the file cannot be read", place(name), "check the storage");
            done += static_cast<uint64_t>(read);
        }
        return text;
    }

    void parse(const std::string& manifest, int schema_version) {
        const std::string where = folder_.place("manifest.json"), hint = "copy the artifact again";
        try {
            const nlohmann::json fields = parse_json(manifest, where);
            const uint64_t version = whole_number(fields.at("schema_version"), where);
            if (version != static_cast<uint64_t>(schema_version)) {
                throw Error("the artifact has schema version " + std::to_string(version) + ", this program reads version " +
                                std::to_string(schema_version),
                            where, "build the program of this artifact");
            }
            for (const auto& item : fields.at("files").items()) {
                FileEntry& entry = entries_[item.key()];
                entry.sha256 = item.value().at("sha256").get<std::string>();
                entry.size = whole_number(item.value().at("size"), where);
            }
            // The checksum is of the text without its own line.
            const std::string sum = fields.at("checksum").get<std::string>(), line = "\n  \"checksum\": \"" + sum + "\",";
            const size_t begin = manifest.find(line);
            const std::string rest = begin == std::string::npos ? "" : std::string(manifest).erase(begin, line.size());
            if (sha256(rest.data(), rest.size()) != sum) {
                throw Error("the manifest is damaged: its checksum is not that of its content", where, hint);
            }
            if (fields.contains("thresholds") && !fields.at("thresholds").is_null()) {
                std::fputs("the artifact's stored thresholds are not used here: this program has those of `fastcar compile --threshold`\n", stderr);
            }
        } catch (const nlohmann::json::exception& error) {
            throw Error(std::string("the manifest is damaged: ") + error.what(), where, hint);
        }
    }

    void require_signed(const std::string& name, const std::string& digest) const {
        const auto found = signed_.find(name);
        if (found == signed_.end() || found->second != digest) {
            throw Error("the signature is not of this artifact as it is: `" + name +
                            (found == signed_.end() ? "` is not signed" : "` was signed with another content"),
                        folder_.place("signature.json"), "do not use the artifact; get it from its signer again");
        }
    }

    void compare_signed() const {
        for (const auto& entry : entries_) require_signed(entry.first, entry.second.sha256);
        if (signed_.size() != entries_.size() + 1) {
            throw Error("the signature is not of this artifact as it is: it covers files that the manifest does not list",
                        folder_.place("signature.json"), "do not use the artifact; get it from its signer again");
        }
    }

    // Check the files that nothing here uses.
    void check_others() const {
        for (const auto& entry : entries_) {
            if (data_.count(entry.first) == 0 && libraries_.count(entry.first) == 0) {
                const auto file = open(entry.first);
                compare(entry.first, Mapping(file.first, file.second, place(entry.first)));
            }
        }
    }

    std::pair<Handle, uint64_t> open(const std::string& name) const {
        const auto entry = entries_.find(name);
        if (entry == entries_.end()) {
            throw Error("the manifest lists no file `" + name + "`", folder_.place("manifest.json"),
                        "build the program of this artifact");
        }
        uint64_t bytes = 0;
        Handle file = folder_.open_file(name, &bytes);
        if (bytes != entry->second.size) {
            throw Error("the file is damaged: it has " + std::to_string(bytes) + " bytes, not " +
                            std::to_string(entry->second.size),
                        place(name), "copy the artifact again");
        }
        return {std::move(file), bytes};
    }

    void compare(const std::string& name, const Mapping& bytes) const {
        if (sha256(bytes.data(), bytes.bytes()) != entries_.at(name).sha256) {
            throw Error("the file is damaged: its SHA-256 is not the manifest's", place(name), "copy the artifact again");
        }
    }

    Folder folder_;
    bool whole_;
    Digests signed_;
    std::map<std::string, FileEntry> entries_;
    std::map<std::string, Mapping> data_;
    std::map<std::string, Sealed> libraries_;
};

}  // namespace fastcar_host
