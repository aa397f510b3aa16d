// Files of a folder, opened once and by handle: no symbolic link is followed, and nothing is opened again by its name.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "fastcar_error.hpp"

namespace fastcar_host {

// A descriptor that is closed with its owner.
class Handle {
public:
    explicit Handle(int number = -1) : number_(number) {}
    Handle(Handle&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Handle& operator=(Handle&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Handle() {
        if (number_ >= 0) close(number_);
    }
    int get() const { return number_; }
    explicit operator bool() const { return number_ >= 0; }

private:
    int number_;
};

// The bytes of a file in memory, mapped for reading.
class Mapping {
public:
    Mapping() = default;
    // Throws Error: they cannot be mapped.
    Mapping(const Handle& file, uint64_t bytes, const std::string& where) : bytes_(bytes) {
        if (bytes == 0) return;
        void* found = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
        if (found == MAP_FAILED) {
            throw Error(std::string("the file cannot be mapped: ") + std::strerror(errno), where, "free some memory");
        }
        data_ = static_cast<const char*>(found);
    }
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Mapping() {
        if (data_ != nullptr) munmap(const_cast<char*>(data_), bytes_);
    }
    const char* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }

private:
    const char* data_ = nullptr;
    uint64_t bytes_ = 0;
};

class Folder {
public:
    // Throws Error: there is no such folder.
    explicit Folder(const std::string& path)
        : path_(path), root_(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        if (!root_) {
            throw Error(std::string("the artifact cannot be opened: ") + std::strerror(errno), path,
                        "give the folder of the artifact");
        }
    }

    std::string place(const std::string& name) const { return path_ + "/" + name; }

    // An open plain file and its size. `name` is relative, in plain form. Throws Error: it is missing or something else.
    Handle open_file(const std::string& name, uint64_t* bytes) const {
        Handle found = descend(name);
        struct stat status;
        if (!found || fstat(found.get(), &status) != 0) {
            const bool link = errno == ELOOP || errno == ENOTDIR;
            throw Error(link ? "the file is a symbolic link" : std::string("the file cannot be opened: ") + std::strerror(errno),
                        place(name), "copy the artifact again");
        }
        if (!S_ISREG(status.st_mode)) throw Error("the file is no plain file", place(name), "copy the artifact again");
        *bytes = static_cast<uint64_t>(status.st_size);
        return found;
    }

private:
    // Part by part, so that no part can be a link. Parts that lead out of the folder are no names of files.
    Handle descend(const std::string& name) const {
        Handle folder;
        size_t start = 0;
        while (true) {
            const size_t end = name.find('/', start);
            const std::string part = name.substr(start, end == std::string::npos ? end : end - start);
            if (part.empty() || part == "." || part == ".." || part.find('\0') != std::string::npos) {
                throw Error("the name leaves the artifact's folder or is not in plain form", place(name),
                            "compile the model again");
            }
            const int above = folder ? folder.get() : root_.get();
            const int flags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
            if (end == std::string::npos) return Handle(openat(above, part.c_str(), flags));
            Handle next(openat(above, part.c_str(), flags | O_DIRECTORY));
            if (!next) return next;
            folder = std::move(next);
            start = end + 1;
        }
    }

    std::string path_;
    Handle root_;
};

// A copy of a file's bytes in memory that nobody can change any more, and a path that the dynamic linker takes.
class Sealed {
public:
    // Throws Error: the system has no memory files, or no memory.
    Sealed(const Handle& from, uint64_t bytes, const std::string& where)
        : file_(memfd_create("fastcar", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
        if (!file_ || !copy(from, bytes) ||
            fcntl(file_.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
            throw Error(std::string("the file cannot be copied to memory: ") + std::strerror(errno), where,
                        "free some memory; Linux 3.17 or newer is needed");
        }
        bytes_ = Mapping(file_, bytes, where);
    }

    const Mapping& bytes() const { return bytes_; }

    // Valid while this object is. The linker knows libraries by their paths, so the number must not be given to another.
    std::string path() const { return "/proc/self/fd/" + std::to_string(file_.get()); }

private:
    bool copy(const Handle& from, uint64_t bytes) const {
        char buffer[1 << 16];
        uint64_t done = 0;
        while (done < bytes) {
            const ssize_t read = pread(from.get(), buffer, sizeof(buffer), static_cast<off_t>(done));
            if (read <= 0 || write(file_.get(), buffer, static_cast<size_t>(read)) != read) return false;
            done += static_cast<uint64_t>(read);
        }
        return done == bytes;
    }

    Handle file_;
    Mapping bytes_;
};

}  // namespace fastcar_host
