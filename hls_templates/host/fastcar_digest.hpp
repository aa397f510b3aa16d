// SHA-256, base64 and signatures by OpenSSL's libcrypto.
#pragma once

#if !__has_include(<openssl/opensslconf.h>)
#error "openssl/opensslconf.h is missing: install OpenSSL's headers for the CPU that runs this program (Debian: libssl-dev), or give SSL_INCLUDE=FOLDER SSL_LIB=FOLDER"
#endif

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fastcar_error.hpp"

namespace fastcar_host {

static const char* const DIGEST_PREFIX = "sha256:";

// SHA-256 in 64 hexadecimal digits.
inline std::string sha256(const void* data, uint64_t bytes) {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    if (EVP_Digest(data, bytes, digest, &size, EVP_sha256(), nullptr) != 1) {
        throw Error("libcrypto computes no SHA-256", "", "use OpenSSL 1.1.1 or newer");
    }
    static const char* const digits = "0123456789abcdef";
    std::string text;
    for (unsigned i = 0; i < size; ++i) {
        text += digits[digest[i] >> 4];
        text += digits[digest[i] & 15];
    }
    return text;
}

// What a base64 text stands for. Throws Error: it is not in canonical form.
inline std::string from_base64(const std::string& text, const std::string& where) {
    std::string data(text.size() / 4 * 3 + 1, '\0');
    const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(&data[0]),
                                     reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
    const size_t padding = text.size() - (text.find_last_not_of('=') + 1);
    if (size < 0 || padding > 2) throw Error("the signature is damaged: no base64", where, "copy the artifact again");
    data.resize(static_cast<size_t>(size) - padding);
    std::string again(text.size() + 1, '\0');
    EVP_EncodeBlock(reinterpret_cast<unsigned char*>(&again[0]), reinterpret_cast<const unsigned char*>(data.data()),
                    static_cast<int>(data.size()));
    again.resize(text.size());
    if (again != text) throw Error("the signature is damaged: no canonical base64", where, "copy the artifact again");
    return data;
}

// A public elliptic curve key in PEM.
class PublicKey {
public:
    // Throws Error: no file, no public key, or one of another kind.
    explicit PublicKey(const std::string& path) : path_(path), key_(nullptr, EVP_PKEY_free) {
        const std::unique_ptr<BIO, decltype(&BIO_free)> file(BIO_new_file(path.c_str(), "r"), BIO_free);
        if (file) key_.reset(PEM_read_bio_PUBKEY(file.get(), nullptr, nullptr, nullptr));
        const std::string hint = "write it with `openssl ec -in signing.pem -pubout -out signing.pub`";
        if (!key_) throw Error("the file holds no public key in PEM", path, hint);
        if (EVP_PKEY_base_id(key_.get()) != EVP_PKEY_EC || hash() == nullptr) {
            throw Error("the key is of another kind; elliptic curve keys on P-256, P-384 and P-521 can be used", path, hint);
        }
    }

    // Whether the holder of the private key signed the message.
    bool signed_by(const std::string& signature, const std::string& message) const {
        const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
        return context && EVP_DigestVerifyInit(context.get(), nullptr, hash(), nullptr, key_.get()) == 1 &&
               EVP_DigestVerify(context.get(), reinterpret_cast<const unsigned char*>(signature.data()), signature.size(),
                                reinterpret_cast<const unsigned char*>(message.data()), message.size()) == 1;
    }

    // SHA-256 of the key's canonical PEM, by which a bundle names it.
    std::string fingerprint() const {
        const std::unique_ptr<BIO, decltype(&BIO_free)> memory(BIO_new(BIO_s_mem()), BIO_free);
        char* text = nullptr;
        if (!memory || PEM_write_bio_PUBKEY(memory.get(), key_.get()) != 1) {
            throw Error("libcrypto cannot write the key", path_, "use OpenSSL 1.1.1 or newer");
        }
        const long size = BIO_get_mem_data(memory.get(), &text);
        return sha256(text, static_cast<uint64_t>(size));
    }

private:
    // As model signing pairs them with curves; null: none of the three.
    const EVP_MD* hash() const {
        switch (EVP_PKEY_bits(key_.get())) {
            case 256: return EVP_sha256();
            case 384: return EVP_sha384();
            case 521: return EVP_sha512();
            default: return nullptr;
        }
    }

    std::string path_;
    std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key_;
};

}  // namespace fastcar_host
